"""How long to wait before the n-th retry."""

from __future__ import annotations

import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecluse.engine.model.retry import RetryPolicy, backoff
from tests.support.seeded import seeded

PRICING = RetryPolicy(executions=4, base=2, multiplier=2, longest=64)
THROTTLED = RetryPolicy(executions=4, base=16, multiplier=2, longest=64)
TRANSCRIPTION = RetryPolicy(executions=6, base=2, multiplier=2, longest=60)
ENRICHMENT = RetryPolicy(executions=3, base=0.25, multiplier=2, longest=1)
READS = RetryPolicy(executions=3, base=1, multiplier=4)

quarters = st.integers(0, 400).map(lambda quarter: quarter / 4)  # exact in binary: the formula can be checked exactly
policies = st.builds(
    RetryPolicy,
    base=quarters,
    multiplier=st.sampled_from([1.0, 1.5, 2.0, 3.0, 10.0]),
    longest=quarters,
    jitter=st.sampled_from([0.0, 0.1, 0.2, 0.5, 1.0]),
    kind=st.sampled_from(["exponential", "fixed"]),
)
retries = st.integers(1, 12)
chances = st.integers(0, 2**32).map(seeded)


def series(policy: RetryPolicy, number: int) -> list[float]:
    return [backoff(policy, n, seeded()) for n in range(1, number + 1)]


@pytest.mark.req("ENG-40")
@pytest.mark.parametrize(
    ("policy", "delays"),
    [
        pytest.param(PRICING, [2, 4, 8], id="pricing"),
        pytest.param(THROTTLED, [16, 32, 64], id="pricing after 429"),
        pytest.param(TRANSCRIPTION, [2, 4, 8, 16, 32], id="transcription"),
        pytest.param(ENRICHMENT, [0.25, 0.5], id="enrichment"),
        pytest.param(READS, [1, 4], id="reads from a CRM"),
        pytest.param(RetryPolicy(base=2, longest=64), [2, 4, 8, 16, 32, 64, 64, 64], id="clamped at the longest"),
        pytest.param(RetryPolicy(base=16, longest=50), [16, 32, 50, 50], id="clamped between two powers"),
        pytest.param(RetryPolicy(base=5, longest=3), [3, 3], id="clamped from the first"),
        pytest.param(RetryPolicy(base=3, multiplier=1), [3, 3, 3], id="a multiplier of one"),
        pytest.param(RetryPolicy(base=0), [0, 0], id="no pause at all"),
        pytest.param(RetryPolicy(), [1, 2, 4, 8, 16, 32, 60, 60], id="what a stage gets that asks for nothing"),
    ],
)
def test_delays_grow_from_the_base_by_the_multiplier_up_to_the_longest(policy, delays) -> None:
    assert series(policy, len(delays)) == delays


@pytest.mark.req("ENG-40")
@given(quarters, st.integers(1, 5), quarters, retries)
def test_without_jitter_the_delay_is_the_formula(base: float, multiplier: int, longest: float, n: int) -> None:
    policy = RetryPolicy(base=base, multiplier=multiplier, longest=longest)
    assert backoff(policy, n, seeded()) == min(base * multiplier ** (n - 1), longest)


@pytest.mark.req("ENG-45")
@pytest.mark.parametrize(
    ("kind", "delays"), [("fixed", [5, 5, 5, 5]), ("exponential", [5, 10, 20, 40])], ids=["fixed", "exponential"]
)
def test_both_kinds_of_backoff_exist(kind, delays) -> None:
    assert series(RetryPolicy(base=5, kind=kind), 4) == delays


@pytest.mark.req("ENG-45")
def test_a_fixed_delay_is_clamped_too() -> None:
    assert series(RetryPolicy(base=90, longest=60, kind="fixed"), 2) == [60, 60]


@pytest.mark.req("ENG-41")
@given(policies, retries, chances)
def test_no_delay_is_negative_or_above_the_longest(policy: RetryPolicy, n: int, chance: random.Random) -> None:
    assert 0 <= backoff(policy, n, chance) <= policy.longest


@pytest.mark.req("ENG-41")
@given(policies, retries, chances)
def test_jitter_stays_within_its_fraction(policy: RetryPolicy, n: int, chance: random.Random) -> None:
    bare = min(policy.base if policy.kind == "fixed" else policy.base * policy.multiplier ** (n - 1), policy.longest)
    delay = backoff(policy, n, chance)
    assert bare * (1 - policy.jitter) - 0.001 <= delay <= bare * (1 + policy.jitter)


@pytest.mark.req("ENG-41")
def test_jitter_is_symmetric_and_uses_its_whole_range() -> None:
    policy, chance = RetryPolicy(base=8, longest=64, jitter=0.2), seeded(1)
    delays = [backoff(policy, 1, chance) for _ in range(4_000)]
    assert min(delays) == pytest.approx(6.4, abs=0.01)
    assert max(delays) == pytest.approx(9.6, abs=0.01)
    assert fmean(delays) == pytest.approx(8, abs=0.1)
    assert sum(delay < 8 for delay in delays) == pytest.approx(2_000, abs=150)


@pytest.mark.req("ENG-41")
def test_jitter_is_clamped_again_at_the_longest() -> None:
    policy, chance = RetryPolicy(base=64, longest=64, jitter=0.2), seeded(1)
    delays = [backoff(policy, 1, chance) for _ in range(500)]
    assert max(delays) == 64
    assert min(delays) < 52


@pytest.mark.req("ENG-41")
@pytest.mark.parametrize(("base", "delay"), [(0.0006, 0.0), (0.0019, 0.001), (1.2345, 1.234), (1.9999, 1.999)])
def test_delays_are_rounded_down_to_whole_milliseconds(base: float, delay: float) -> None:
    assert series(RetryPolicy(base=base), 1) == [delay]


@pytest.mark.req("ENG-41")
@given(policies, retries, chances)
def test_delays_are_whole_milliseconds(policy: RetryPolicy, n: int, chance: random.Random) -> None:
    delay = backoff(policy, n, chance)
    assert delay == round(delay, 3)


@pytest.mark.req("ENG-41")
@pytest.mark.parametrize("milliseconds", [1001, 1003, 1005])
def test_a_delay_of_whole_milliseconds_loses_none(milliseconds: int) -> None:
    assert series(RetryPolicy(base=milliseconds / 1000), 1) == [milliseconds / 1000]


@pytest.mark.req("ENG-40")
@pytest.mark.parametrize(("multiplier", "n"), [(2.0, 1_100), (10.0, 400)])
def test_a_late_retry_waits_the_longest_delay(multiplier: float, n: int) -> None:
    assert backoff(RetryPolicy(executions=5_000, multiplier=multiplier), n, seeded()) == 60


@pytest.mark.req("ENG-47")
@given(policies, st.integers(0, 2**32))
def test_the_same_seed_gives_the_same_delays(policy: RetryPolicy, seed: int) -> None:
    one, other = seeded(seed), seeded(seed)
    assert [backoff(policy, n, one) for n in range(1, 6)] == [backoff(policy, n, other) for n in range(1, 6)]


@pytest.mark.req("ENG-47")
def test_another_seed_gives_other_delays() -> None:
    policy = RetryPolicy(base=2, longest=64, jitter=0.2)
    assert backoff(policy, 1, seeded(1)) != backoff(policy, 1, seeded(2))


def test_without_jitter_no_chance_is_drawn() -> None:
    chance = seeded(3)
    before = chance.getstate()
    backoff(PRICING, 1, chance)
    assert chance.getstate() == before


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"executions": 0}, id="no execution at all"),
        pytest.param({"executions": -1}, id="a negative budget"),
        pytest.param({"base": -0.1}, id="a negative base"),
        pytest.param({"longest": -1}, id="a negative longest"),
        pytest.param({"multiplier": 0.9}, id="delays that shrink"),
        pytest.param({"jitter": -0.1}, id="a negative jitter"),
        pytest.param({"jitter": 1.1}, id="more jitter than delay"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(wrong) -> None:
    with pytest.raises(ValueError, match=r"at least 1"):
        RetryPolicy(**wrong)
