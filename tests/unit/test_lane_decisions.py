"""What a call's end says about its lane, when a row of failures is too long, and why an item waits: tables of cases."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from ecluse.base.errors import NotSentError, PermanentError, TransientError
from ecluse.engine import Breaker, Lane, Stage
from ecluse.engine.lanes import TRIGGERED, asked_for, counts, tally
from ecluse.engine.waiting import Facts, expected, explain

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


@pytest.mark.parametrize(
    ("breaker", "error", "verdict"),
    [
        (Breaker(), THROTTLED, True),
        (Breaker(), None, False),
        (Breaker(), PermanentError("404", code="NOT_FOUND"), False),
        (Breaker(), TransientError("500", code="VENDOR_ERROR_500"), False),
        (Breaker(), NotSentError("refused"), None),
        (Breaker(), TransientError("no answer", code="TIMEOUT"), None),
        (Breaker(), KeyError("colour"), None),
        (Breaker(codes=frozenset({"TIMEOUT"})), TransientError("no answer", code="TIMEOUT"), True),
        (None, THROTTLED, None),
        (None, None, None),
    ],
    ids=str,
)
def test_a_breaker_counts_its_codes_and_any_other_answer_ends_the_row(breaker, error, verdict):
    assert counts(breaker, error) is verdict


@pytest.mark.parametrize(
    ("failures", "ends", "most", "after"),
    [
        (0, "", 5, (0, False)),
        (0, "fffff", 5, (5, False)),
        (0, "ffffff", 5, (5, True)),
        (5, "f", 5, (5, True)),
        (5, ".", 5, (0, False)),
        (4, "f.fff", 5, (3, False)),
        (0, "ff.ffffff.", 5, (5, True)),
        (0, "ff", 1, (1, True)),
    ],
)
def test_more_than_so_many_in_a_row_are_too_many_and_the_next_one_after_the_pause_decides(failures, ends, most, after):
    assert tally(failures, [end == "f" for end in ends], most) == after


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
    now=NOW, id=1, key="k", stage="work", due_at=NOW, executions=0, crashes=0, error_code=None, error=None, position=3,
    counted=9, lane="lane", paused_reason=None, paused_by=None, held_until=None, held_reason=None, spacing=None,
    next_free_at=NOW, max_in_flight=None, in_flight=0, probing=False, key_full=False, max_per_key=None, workers=1,
    hands=10, busy=10, pace=None,
)  # fmt: skip
FAILED = {"error_code": "TIMEOUT", "error": "no answer", "executions": 1}
PAUSED = {"paused_reason": "invoice", "paused_by": "cli:ann"}
HELD = {"held_until": NOW + 60 * SECOND, "held_reason": "Retry-After: 429"}
RATED = {"spacing": 6 * SECOND, "next_free_at": NOW + 4 * SECOND}
LATER = NOW + 30 * SECOND

WHY = [
    ({}, "queued", "all 10 hands of 1 workers are busy; 3 before it", None),
    ({"pace": 1.5}, "queued", "3 before it", NOW + 2 * SECOND),
    ({"busy": 9, "position": 0}, "queued", "about to be taken up", NOW),
    ({"pace": 1.5, "position": None}, "queued", "at least 9 before it", None),
    (PAUSED, "paused", "by cli:ann: invoice", None),
    (PAUSED | HELD | FAILED | {"due_at": LATER}, "paused", "invoice", None),
    (HELD, "held", "until 2026-03-01 12:01:00Z: Retry-After: 429", NOW + 60 * SECOND),
    (HELD | FAILED | {"due_at": LATER}, "held", "Retry-After", NOW + 60 * SECOND),
    (HELD | RATED, "held", "Retry-After", NOW + 78 * SECOND),
    (
        FAILED | {"due_at": LATER, "position": None},
        "retry",
        "execution 2 at 2026-03-01 12:00:30Z, after TIMEOUT",
        LATER,
    ),
    ({"due_at": LATER, "position": None}, "retry", "not before 2026-03-01 12:00:30Z", LATER),
    ({"crashes": 1}, "suspect", "1 workers died with it in hand: it is run apart", None),
    ({"crashes": 3}, "suspect", "it is run alone", None),
    ({"workers": 0, "hands": 0, "busy": 0}, "no worker", "no live worker can do work", None),
    ({"probing": True}, "held", "one call at a time", None),
    ({"max_in_flight": 2, "in_flight": 2, "pace": 3.0}, "in flight", "has its 2 calls", NOW + SECOND),
    ({"max_per_key": 1, "key_full": True}, "per key", "1 of its group are in flight", None),
    (RATED, "throttled", "starts 10 calls a minute; 3 before it", NOW + 22 * SECOND),
]


@pytest.mark.req("ENG-53")
@pytest.mark.parametrize(("facts", "cause", "says", "at"), WHY, ids=[f"{cause} {says}" for _, cause, says, _ in WHY])
def test_a_waiting_item_has_a_cause_and_an_instant_where_one_can_be_told(facts, cause, says, at):
    item = replace(PLAIN, **facts)
    found, detail = explain(item)
    assert found == cause
    assert says in detail
    assert expected(item) == at


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        (HELD | {"held_reason": "429 for account 4711"}, "is held until 2026-03-01 12:01:00Z: after the vendor's word"),
        (HELD | {"held_reason": f"{TRIGGERED}: 4711"}, "is held until 2026-03-01 12:01:00Z: its breaker is open"),
        ({"paused_reason": "invoice", "paused_by": "cli:ann 4711"}, "was paused: invoice"),
    ],
)
def test_a_tenant_is_not_told_who_paused_a_lane_nor_what_the_vendor_said_to_others(facts, says):
    detail = explain(replace(PLAIN, **facts), shared=True)[1]
    assert detail.endswith(says)
    assert "4711" in explain(replace(PLAIN, **facts))[1]
