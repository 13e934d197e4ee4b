"""Whether to try again after an error, and when."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecluse.base.errors import (
    EcluseError,
    InvalidInput,
    NonRetriableError,
    NotSentError,
    PermanentError,
    TransientError,
    VendorError,
)
from ecluse.base.retry_after import parse_retry_after
from ecluse.engine.model.retry import Backoff, GiveUp, Retry, RetryPolicy, decide
from tests.support.seeded import seeded

NOW = datetime(2001, 2, 3, 4, 5, 6, tzinfo=UTC)  # long ago: code that read a real clock would fail
PRICING = RetryPolicy(executions=4, base=2, multiplier=2, longest=64)


def delay(error: Exception, executions: int = 1, policy: RetryPolicy = PRICING) -> float:
    verdict = decide(error, executions=executions, policy=policy, now=NOW, chance=seeded())
    assert isinstance(verdict, Retry)
    return (verdict.at - NOW).total_seconds()


def executions_until_given_up(policy: RetryPolicy) -> int:
    for executions in range(1, 100):
        verdict = decide(TransientError("no"), executions=executions, policy=policy, now=NOW, chance=seeded())
        if isinstance(verdict, GiveUp):
            assert not verdict.permanent
            return executions
    raise AssertionError("it was not given up")


@pytest.mark.req("ENG-46")
@pytest.mark.parametrize(
    "budget",
    [
        pytest.param(4, id="pricing: one and three retries"),
        pytest.param(5 + 1, id="scheduled job: its maxRetries, 5, and one"),
        pytest.param(3, id="enrichment source: one and two retries"),
        pytest.param(6, id="recording: six in all"),
    ],
)
def test_a_budget_is_the_number_of_executions_in_all(budget: int) -> None:
    assert executions_until_given_up(RetryPolicy(executions=budget)) == budget


@pytest.mark.req("ENG-16")
def test_no_retry_at_all_is_a_budget_of_one_execution() -> None:
    assert executions_until_given_up(RetryPolicy(executions=1)) == 1


@pytest.mark.req("ENG-16")
def test_not_even_a_retry_after_brings_a_retry_where_there_are_none() -> None:
    error = TransientError("busy", retry_after=1)
    verdict = decide(error, executions=1, policy=RetryPolicy(executions=1), now=NOW, chance=seeded())
    assert verdict == GiveUp(permanent=False)


@pytest.mark.req("ENG-40")
def test_the_nth_failure_waits_the_nth_delay() -> None:
    assert [delay(TransientError("no"), n) for n in (1, 2, 3)] == [2, 4, 8]


@pytest.mark.req("ENG-42")
@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(0.0, id="at once"),
        pytest.param(0.5, id="sooner than the backoff"),
        pytest.param(30.0, id="later than the backoff"),
        pytest.param(300.0, id="later than the longest backoff"),
        pytest.param(900.0, id="just as late as sanity allows"),
    ],
)
def test_a_retry_after_wins_over_the_backoff(asked: float) -> None:
    assert delay(TransientError("busy", retry_after=asked)) == asked


@pytest.mark.req("ENG-42")
@pytest.mark.parametrize("asked", [900.001, 901.0, 86_400.0, float("inf"), None])
def test_a_retry_after_beyond_fifteen_minutes_or_none_leaves_the_backoff(asked: float | None) -> None:
    assert delay(TransientError("busy", retry_after=asked), 2) == 4


@pytest.mark.req("ENG-42")
def test_a_retry_after_beyond_fifteen_minutes_uses_up_the_attempt_like_any_failure() -> None:
    error = TransientError("busy", retry_after=901)
    assert decide(error, executions=4, policy=PRICING, now=NOW, chance=seeded()) == GiveUp(permanent=False)


@pytest.mark.req("ENG-42")
@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("30", 30.0),
        ("Sat, 03 Feb 2001 04:05:36 GMT", 30.0),
        ("-5", 0.0),
        ("Sat, 03 Feb 2001 04:05:05 GMT", 0.0),
        ("a while", 2.0),
        (None, 2.0),
    ],
)
def test_from_the_header_to_the_next_attempt(header: str | None, seconds: float) -> None:
    assert delay(TransientError("busy", retry_after=parse_retry_after(header, NOW))) == seconds


def test_jitter_does_not_touch_what_the_vendor_asked_for() -> None:
    assert delay(TransientError("busy", retry_after=10), policy=RetryPolicy(jitter=1)) == 10


@pytest.mark.parametrize("executions", [1, 3, 4])
def test_a_permanent_error_is_not_tried_again_in_this_round_or_another(executions: int) -> None:
    verdict = decide(PermanentError("no"), executions=executions, policy=PRICING, now=NOW, chance=seeded())
    assert verdict == GiveUp(permanent=True)


@pytest.mark.req("ENG-07")
def test_a_non_retriable_error_is_not_tried_again() -> None:
    verdict = decide(NonRetriableError("stop"), executions=1, policy=PRICING, now=NOW, chance=seeded())
    assert verdict == GiveUp(permanent=True)


@pytest.mark.parametrize(
    "error",
    [TransientError("no"), NotSentError("no"), VendorError("no"), EcluseError("no"), KeyError("bug"), OSError("bug")],
    ids=lambda error: type(error).__name__,
)
def test_every_other_error_is_tried_again_within_the_budget(error: Exception) -> None:
    assert delay(error, 3) == 8
    assert decide(error, executions=4, policy=PRICING, now=NOW, chance=seeded()) == GiveUp(permanent=False)


@pytest.mark.req("ENG-47")
def test_a_decision_depends_on_the_time_and_the_chance_it_is_given_and_on_nothing_else() -> None:
    policy = RetryPolicy(base=2, longest=64, jitter=0.2)

    def instants(seed: int, now: datetime) -> list[datetime]:
        chance = seeded(seed)
        verdicts = [decide(InvalidInput("no"), executions=1, policy=policy, now=now, chance=chance) for _ in range(5)]
        return [verdict.at for verdict in verdicts if isinstance(verdict, Retry)]

    later = timedelta(days=300)
    assert len(set(instants(7, NOW))) == 5
    assert instants(7, NOW) == instants(7, NOW)
    assert instants(7, NOW + later) == [at + later for at in instants(7, NOW)]
    assert instants(8, NOW) != instants(7, NOW)


@pytest.mark.req("ENG-91")
@given(
    asked=st.none() | st.floats(min_value=0),
    executions=st.integers(1, 8),
    budget=st.integers(1, 6),
    longest=st.integers(0, 120),
)
def test_every_decision_gives_up_or_waits_no_longer_than_its_bound(asked, executions, budget, longest) -> None:
    policy = RetryPolicy(executions=budget, longest=longest)
    error = TransientError("no", retry_after=asked)
    verdict = decide(error, executions=executions, policy=policy, now=NOW, chance=seeded())
    assert isinstance(verdict, GiveUp) == (executions >= budget)
    if isinstance(verdict, Retry):
        assert NOW <= verdict.at <= NOW + timedelta(seconds=max(900, longest))


def status_429() -> TransientError:
    error = TransientError("too many", code="VENDOR_ERROR_429", ambiguous=False)
    error.status = 429
    return error


SHOP = RetryPolicy(executions=4, base=2, longest=64, jitter=0.2, throttled=Backoff(base=16, longest=64))


@pytest.mark.req("PRC-39", "PRC-40", "PRC-41")
@pytest.mark.parametrize("error", [TransientError("a 200", code="THROTTLED"), status_429()], ids=["code", "status"])
def test_a_throttled_call_has_delays_of_its_own(error: TransientError) -> None:
    assert [delay(error, executions, SHOP) for executions in (1, 2, 3)] == [16, 32, 64]
    assert delay(TransientError("wait", code="THROTTLED", retry_after=3), 2, SHOP) == 3, "the vendor's word goes first"


@pytest.mark.req("PRC-33", "PRC-34", "PRC-35", "PRC-38")
def test_other_failures_keep_the_ordinary_delays() -> None:
    for executions, middle in ((1, 2), (2, 4), (3, 8)):
        found = delay(TransientError("500", code="VENDOR_ERROR_500"), executions, SHOP)
        assert 0.8 * middle <= found <= 1.2 * middle
        assert (found * 1000).is_integer()
    assert executions_until_given_up(SHOP) == 4


def test_without_a_series_of_its_own_a_throttled_call_has_the_ordinary_one() -> None:
    assert delay(TransientError("a 200", code="THROTTLED"), 2) == 4
