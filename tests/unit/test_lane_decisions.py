"""What a call's end says about its lane, when a row of failures is too long, and why an item waits: tables of cases."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from ecluse.base.errors import NotSentError, PermanentError, TransientError
from ecluse.engine import Breaker, Lane, Stage
from ecluse.engine.model.breaker import (
    NO_FAILURES,
    OUTAGES,
    TRIGGERED,
    VENDOR_DOWN,
    CallResult,
    FailureStreak,
    asked_for,
    counts,
    is_spared,
    is_vendor_outage,
    tally,
)
from ecluse.insight.causes import Facts, cause_of, detail_with_position, expected, grouped, merged, summary

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)


@pytest.mark.parametrize(
    ("error", "until"),
    [
        (TransientError("429", code="THROTTLED", retry_after=7), NOW + 7 * SECOND),
        (TransientError("503", code="VENDOR_ERROR_503", retry_after=7), NOW + 7 * SECOND),
        (TransientError("429", code="THROTTLED"), None),
        (TransientError("429", code="THROTTLED", retry_after=0), None),
        (TransientError("429", code="THROTTLED", retry_after=900), NOW + 900 * SECOND),
        (TransientError("429", code="THROTTLED", retry_after=901), None),
        (PermanentError("404"), None),
        (NotSentError("refused"), None),
        (KeyError("colour"), None),
    ],
    ids=str,
)
def test_only_a_vendor_that_asked_for_patience_we_can_give_closes_its_lane(error, until):
    assert asked_for(error, NOW) == until


THROTTLED = TransientError("429", code="THROTTLED")
STATUS_429 = TransientError("429", code="VENDOR_ERROR_429", ambiguous=False)
STATUS_429.status = 429


@pytest.mark.parametrize(
    ("breaker", "error", "verdict"),
    [
        (Breaker(), THROTTLED, True),
        (Breaker(), STATUS_429, True),
        (Breaker(), None, False),
        (Breaker(), PermanentError("404", code="NOT_FOUND"), False),
        (Breaker(), TransientError("500", code="VENDOR_ERROR_500"), False),
        (Breaker(), NotSentError("refused"), None),
        (Breaker(), TransientError("no answer", code="TIMEOUT"), None),
        (Breaker(), KeyError("colour"), None),
        (Breaker(codes=frozenset({"TIMEOUT"})), TransientError("no answer", code="TIMEOUT"), True),
        (Breaker(silent=frozenset({"ELSEWHERE"})), TransientError("another host", code="ELSEWHERE"), None),
        (VENDOR_DOWN, TransientError("500", code="VENDOR_ERROR_500"), True),
        (VENDOR_DOWN, TransientError("cut", code="VENDOR_DISCONNECTED"), True),
        (VENDOR_DOWN, NotSentError("refused"), True),
        (VENDOR_DOWN, THROTTLED, False),
        (None, THROTTLED, None),
        (None, None, None),
    ],
    ids=lambda value: "breaker" if isinstance(value, Breaker) else str(value),  # a set has no order
)
def test_a_breaker_counts_its_codes_and_any_other_answer_ends_the_row(breaker, error, verdict):
    assert counts(breaker, error) is verdict


def ends(said: str) -> list[CallResult]:
    """Each letter an item whose call failed; a dot is an answer. One a second."""
    return [CallResult(1, ord(one), one, NOW + n * SECOND, None, one != ".") for n, one in enumerate(said)]


@pytest.mark.parametrize(
    ("row", "said", "most", "after"),
    [
        (NO_FAILURES, "", 5, (0, False)),
        (NO_FAILURES, "abcde", 5, (5, False)),
        (NO_FAILURES, "abcdef", 5, (5, True)),
        (FailureStreak(5, 1, NOW), "a", 5, (5, True)),
        (FailureStreak(5, 1, NOW), ".", 5, (0, False)),
        (FailureStreak(4, 0, NOW), "a.bcd", 5, (3, False)),
        (NO_FAILURES, "ab.cdefgh.", 5, (5, True)),
        (NO_FAILURES, "aa", 1, (1, True)),
    ],
)
def test_more_than_so_many_in_a_row_are_too_many_and_the_next_one_after_the_pause_decides(row, said, most, after):
    found, too_long = tally(row, ends(said), most)
    assert (found.failures, too_long) == after
    assert found.trips == (row.trips if found.failures else 0) + too_long


@pytest.mark.parametrize(
    ("said", "since", "items"),
    [
        ("abc", NOW, "abc"),
        ("aab", NOW, "ab"),
        ("ab.c", NOW + 3 * SECOND, "c"),
        ("abcdefgh", NOW, "abcdef"),
        ("ab.", None, ""),
        ("aaaaaab.c", NOW, "abc"),
    ],
)
def test_a_row_knows_since_when_it_lasts_and_whose_calls_are_in_it(said, since, items):
    row, _ = tally(NO_FAILURES, ends(said), 5)
    assert (row.since, row.items) == (since, frozenset(map(ord, items)))


def test_pauses_double_up_to_the_longest_and_one_without_growth_stays():
    assert [VENDOR_DOWN.pause_after(n).total_seconds() for n in (0, 1, 2, 3, 4, 5, 5_000)] == [2, 4, 8, 16, 30, 30, 30]
    assert [Breaker().pause_after(n).total_seconds() for n in (0, 1, 99)] == [60, 60, 60]


@pytest.mark.parametrize(
    ("failures", "items", "lasted", "executions", "budget", "spared"),
    [
        (5, 5, 0, 1, 3, False),  # it may be the item's own fault
        (5, 6, 0, 1, 3, True),  # so many different ones cannot be at fault
        (5, 6, 1000, 3, 3, True),
        (3, 1, 89, 3, 3, True),  # no other call was answered either: not given up yet
        (3, 1, 90, 3, 3, False),
        (2, 1, 1, 3, 3, False),  # another call was answered
        (3, 1, 1, 2, 3, False),
        (5, 1, 1, 6, 6, True),
        (4, 1, 1, 6, 6, False),
        (1, 1, 1, 1, 1, True),
    ],
)
def test_an_outage_uses_up_an_execution_only_while_the_item_may_be_at_fault(
    failures, items, lasted, executions, budget, spared
):
    row, now = FailureStreak(failures, 0, NOW, frozenset(range(items))), NOW + lasted * SECOND
    assert is_spared(VENDOR_DOWN, row, now, executions=executions, budget=budget) is spared


@pytest.mark.parametrize(
    ("breaker", "code", "outage"),
    [
        (VENDOR_DOWN, "VENDOR_ERROR_503", True),
        (VENDOR_DOWN, "THROTTLED", False),
        (VENDOR_DOWN, "BAD_ANSWER", False),
        (Breaker(), "THROTTLED", False),
        (Breaker(), "TIMEOUT", False),
        (None, "TIMEOUT", False),
    ],
)
def test_a_429_uses_up_an_attempt_whatever_its_breaker_does(breaker, code, outage):
    assert is_vendor_outage(breaker, TransientError("no", code=code)) is outage
    assert {"VENDOR_ERROR_500", "VENDOR_ERROR_599", "TIMEOUT"} < OUTAGES


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Lane("v", max_in_flight=0), "max_in_flight is 0; give a number above 0"),
        (lambda: Lane("v", max_per_key=-1), "max_per_key is -1"),
        (lambda: Lane("v", per_second=0), "per_second is 0"),
        (lambda: Lane("v", per_second=float("nan")), "per_second is nan"),
        (lambda: Lane("v", burst=0), "burst is 0"),
        (lambda: Lane(""), "needs a name"),
        (lambda: Breaker(failures=0), "at least 1 failure"),
        (lambda: Breaker(pause=timedelta(0)), "a pause above 0"),
        (lambda: Stage("s", Lane("v"), None, weight=0), "weight is 0; a call takes at least 1"),
        (lambda: Stage("s", Lane("v"), None, time_limit=timedelta(0)), "time limits are above 0"),
    ],
)
def test_a_budget_that_can_never_be_used_is_refused_with_what_to_do(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_a_cap_per_minute_is_a_rate():
    assert Lane("speech", per_second=Lane.per_minute(10)).per_second == pytest.approx(1 / 6)


PLAIN = Facts(
    now=NOW, id=1, run_id=7, flow="test", stage="work", key="k", target="t", due_at=NOW, executions=0, crashes=0,
    suspicion=0, error_code=None, error=None, postponed_cause=None, postponed_why=None, position=3,
    permits_ahead=3, counted=9, lane="lane", paused_at=None, paused_reason=None, held_until=None, held_reason=None,
    down_since=None, clock_stopped=False, per_second=None, spacing=None, next_free_at=NOW, max_in_flight=None,
    in_flight=0,
    probing=False, key_full=False, max_per_key=None, workers=1,
    hands=10, busy=10, own=7, share_full=False, pace=None,
)  # fmt: skip
FAILED = {"error_code": "TIMEOUT", "error": "no answer", "executions": 1}
PAUSED = {"paused_reason": "invoice"}
HELD = {"held_until": NOW + 60 * SECOND, "held_reason": "Retry-After: 429"}
LEASED = {"postponed_cause": "lease", "postponed_why": "run 3 has it"}
DOWN = {"down_since": NOW - 9 * SECOND}
BROKEN = DOWN | {"held_until": NOW + 60 * SECOND, "held_reason": f"{TRIGGERED}: 4711"}
RATED = {"per_second": 1 / 6, "spacing": 6 * SECOND, "next_free_at": NOW + 4 * SECOND}
LATER = NOW + 30 * SECOND

WHY = [
    ({}, "queued", "the 10 worker slots of 1 replica are in use; 3 calls before it", None),
    (
        {"busy": 9, "share_full": True, "position": 0},
        "queued",
        "7 calls of the tenant to this vendor are in flight: its share of the 10 worker slots of 1 replica",
        None,
    ),
    ({"pace": 1.5}, "queued", "3 calls before it", NOW + 2 * SECOND),
    ({"busy": 9, "position": 0}, "queued", "about to be claimed", NOW),
    ({"pace": 1.5, "position": None}, "queued", "at least 9 calls before it", None),
    (PAUSED, "paused", "was paused by an operator: invoice", None),
    (PAUSED | HELD | FAILED | {"due_at": LATER}, "paused", "invoice", None),
    (HELD, "held", "until 2026-03-01 12:01:00Z: as the vendor asked (Retry-After)", NOW + 60 * SECOND),
    (HELD | FAILED | {"due_at": LATER}, "held", "Retry-After", NOW + 60 * SECOND),
    (HELD | RATED, "held", "Retry-After", NOW + 78 * SECOND),
    (PAUSED | {"clock_stopped": True}, "paused", "invoice; the clock of its stage is stopped", None),
    (
        BROKEN,
        "breaker",
        "lane lane: vendor down since 2026-03-01 11:59:51Z, next probe 2026-03-01 12:01:00Z",
        NOW + 60 * SECOND,
    ),
    (DOWN | {"probing": True}, "breaker", "one call at a time probes it; 3 calls before it", None),
    (
        FAILED | {"due_at": LATER, "position": None},
        "retry",
        "execution 2 at 2026-03-01 12:00:30Z, after TIMEOUT",
        LATER,
    ),
    ({"due_at": LATER, "position": None}, "window", "not before 2026-03-01 12:00:30Z", LATER),
    (FAILED | {"due_at": LATER, "workers": 0}, "no worker", "test/work", None),
    (LEASED, "lease", "run 3 has it; checked again at 2026-03-01 12:00:00Z", None),
    (LEASED | RATED | {"due_at": LATER}, "lease", "run 3 has it", None),
    (LEASED | HELD, "held", "Retry-After", NOW + 60 * SECOND),
    (LEASED | {"postponed_cause": "postponed", "due_at": LATER, "position": None}, "postponed", "run 3 has it", LATER),
    (LEASED | {"postponed_cause": "postponed"}, "queued", "3 calls before it", None),
    (HELD | {"held_reason": f"{TRIGGERED}: 503"}, "breaker", "until 2026-03-01 12:01:00Z", NOW + 60 * SECOND),
    ({"crashes": 7}, "queued", "3 calls before it", None),
    (
        {"crashes": 3, "suspicion": 1},
        "suspect",
        "3 workers died while it was in flight: it is run in a small group",
        None,
    ),
    ({"crashes": 5, "suspicion": 3}, "suspect", "it is run alone", None),
    ({"crashes": 6, "suspicion": 4}, "suspect", "it is not run again", None),
    ({"workers": 0, "hands": 0, "busy": 0}, "no worker", "no live worker can do test/work", None),
    ({"probing": True}, "breaker", "one call at a time", None),
    ({"max_in_flight": 2, "in_flight": 2, "pace": 3.0}, "in flight", "has its 2 calls", NOW + SECOND),
    ({"max_per_key": 1, "key_full": True}, "per key", "1 of its group are in flight", None),
    (RATED, "throttled", "starts 10 calls a minute; 3 calls before it", NOW + 22 * SECOND),
]


@pytest.mark.req("ENG-53")
@pytest.mark.parametrize(("facts", "cause", "says", "at"), WHY, ids=[f"{cause} {says}" for _, cause, says, _ in WHY])
def test_a_waiting_item_has_a_cause_and_an_instant_where_one_is_known(facts, cause, says, at):
    item = replace(PLAIN, **facts)
    assert cause_of(item) == cause
    assert says in detail_with_position(item)
    assert expected(item) == at


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        (
            HELD | {"held_reason": "429 for account 4711"},
            "is held until 2026-03-01 12:01:00Z: as the vendor asked (Retry-After)",
        ),
        (HELD | {"held_reason": f"{TRIGGERED}: 4711"}, "is held until 2026-03-01 12:01:00Z: its breaker is open"),
        (BROKEN, "vendor down since 2026-03-01 11:59:51Z, next probe 2026-03-01 12:01:00Z"),
        (DOWN | {"probing": True}, "one call at a time probes it; 3 calls before it"),
    ],
)
def test_a_tenant_does_not_see_the_vendors_answers_to_others(facts, says):
    assert detail_with_position(replace(PLAIN, **facts)).endswith(says)


def test_what_waits_for_the_same_cause_is_one_group_with_its_first_and_last_start():
    rated = replace(PLAIN, **RATED)
    far = replace(rated, id=2, key="far", position=None)
    group = grouped([rated, far], 101)
    assert (group.cause, group.lane, group.count) == ("throttled", "lane", 101)
    assert group.detail == "lane lane starts 10 calls a minute"
    assert (group.first_at, group.last_at) == (NOW + 22 * SECOND, NOW + 622 * SECOND), "at the earliest"
    assert [one.key for one in group.sample] == ["k", "far"]
    other = grouped([replace(rated, position=0, permits_ahead=0)], 1)
    (both,) = merged([group, other])
    assert (both.count, both.first_at, both.last_at) == (102, NOW + 4 * SECOND, NOW + 622 * SECOND)
    unpredictable = grouped([replace(rated, position=None)], 5)
    assert merged([group, unpredictable])[0].last_at is None
    paused = grouped([replace(PLAIN, **PAUSED)], 3)
    assert [one.cause for one in merged([paused, group])] == ["throttled", "paused"]
    assert summary([group, paused], 104, 2) == (
        "104 waiting, 2 in flight: 101 of them: lane lane starts 10 calls a minute; "
        "3 of them: lane lane was paused by an operator: invoice; resume it with ecluse lanes resume lane --reason TEXT"
    )


def test_of_attempts_that_wait_for_their_time_the_first_and_last_instant_are_shown():
    first, last = (replace(PLAIN, **FAILED, due_at=NOW + n * SECOND, position=None) for n in (10, 70))
    group = grouped([first, last], 40)
    assert group.detail == (
        "next attempts from 2026-03-01 12:00:10Z to 2026-03-01 12:01:10Z, the first after TIMEOUT: no answer"
    )
    assert (group.first_at, group.last_at) == (NOW + 10 * SECOND, NOW + 70 * SECOND)
