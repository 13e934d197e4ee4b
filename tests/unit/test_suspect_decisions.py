"""Which item kills its workers: what convicts one, and how often chance would."""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecluse.engine.work.suspects import (
    MOST_SOLO_DEATHS,
    SOLO_DEATHS,
    Evidence,
    Suspicion,
    group_sizes,
    judge,
)

NONE, TENTH, HUNDREDTH, ALONE, POISON, DEADLY = Suspicion

JUDGED = {
    "once is nothing": (Evidence(1, 1), NONE),
    "twice is nothing": (Evidence(2, 2), NONE),
    "there at every death": (Evidence(3, 3), TENTH),
    "there at nearly every death": (Evidence(4, 5), TENTH),
    "others die as well": (Evidence(3, 4), NONE),
    "there at few of many": (Evidence(7, 30), NONE),
    "there at very many": (Evidence(8, 30), TENTH),
    "deaths whose tombstones were never there": (Evidence(5, 0), TENTH),
    "once in a group": (Evidence(4, 4, group_deaths=1), HUNDREDTH),
    "twice in a group": (Evidence(5, 5, group_deaths=2), ALONE),
    "once alone": (Evidence(4, 3, solo_deaths=1), ALONE),
    "twice alone": (Evidence(7, 5, group_deaths=2, solo_deaths=2), ALONE),
    "three times alone": (Evidence(8, 5, group_deaths=2, solo_deaths=3), POISON),
    "three times alone, one died without it": (Evidence(8, 6, group_deaths=2, solo_deaths=3), ALONE),
    "four times alone, one died without it": (Evidence(9, 6, group_deaths=2, solo_deaths=4), POISON),
    "five times alone, many died without it": (Evidence(10, 40, group_deaths=2, solo_deaths=5), ALONE),
    "six times alone, many died without it": (Evidence(11, 40, group_deaths=2, solo_deaths=6), POISON),
    "and when asked about": (Evidence(9, 5, group_deaths=2, solo_deaths=4), DEADLY),
    "and when asked about, many died without it": (Evidence(12, 40, group_deaths=2, solo_deaths=7), DEADLY),
}


@pytest.mark.parametrize(("seen", "verdict"), JUDGED.values(), ids=JUDGED)
def test_evidence_is_judged(seen: Evidence, verdict: Suspicion) -> None:
    assert judge(seen) is verdict


COUNT = st.integers(0, 30)


@given(COUNT, COUNT)
def test_nothing_but_deaths_alone_convicts(crashes: int, deaths: int) -> None:
    assert judge(Evidence(crashes, deaths, group_deaths=crashes)) < POISON


@pytest.mark.parametrize("others", [0, 1, 2, 100])
@pytest.mark.parametrize("hands", [1, 6, 20, 200, 1_000])
def test_a_culprit_is_convicted_after_a_bounded_number_of_deaths(hands: int, others: int) -> None:
    """Each death in company, in its group and alone, as the workers would take it up, with suspects in plenty."""
    seen, verdict = Evidence(0, 0), NONE
    while verdict < POISON:
        most = group_sizes({verdict: 1_000}, hands)[verdict] if verdict else None
        solo, group = seen.solo_deaths + (most == 1), seen.group_deaths + (most is not None and most > 1)
        seen = Evidence(seen.crashes + 1, seen.crashes + 1 - solo + others, group, solo)
        verdict = judge(seen)
    assert seen.crashes <= (8 if others == 0 else 16)
    assert seen.solo_deaths == min(SOLO_DEATHS + others, MOST_SOLO_DEATHS)


@pytest.mark.parametrize(
    ("waiting", "hands", "most"),
    [
        ({TENTH: 200, HUNDREDTH: 20, ALONE: 2}, 200, {TENTH: 20, HUNDREDTH: 2, ALONE: 1}),
        ({TENTH: 200, POISON: 1, DEADLY: 1}, 200, {TENTH: 20, POISON: 1, DEADLY: 1}),
        ({TENTH: 10, HUNDREDTH: 1}, 20, {TENTH: 2, HUNDREDTH: 1}),
        ({TENTH: 10}, 6, {TENTH: 1}),
        ({TENTH: 2, HUNDREDTH: 1}, 200, {TENTH: 1, HUNDREDTH: 1}),
        ({TENTH: 3, HUNDREDTH: 1}, 200, {TENTH: 20, HUNDREDTH: 2}),
        ({}, 200, {}),
    ],
)
def test_many_suspects_run_in_groups_and_few_alone(waiting, hands, most) -> None:
    assert group_sizes(waiting, hands) == most


# ── Chance ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Storm:
    """Workers killed at random, each started again at once."""

    pause: tuple[float, float]  # between kills
    replicas: int = 3
    dead_after: tuple[float, float] = (4.0, 7.0)  # from the kill to the take-over, as the last heartbeat falls
    seconds: float = 50_000


class Weather:
    """When which worker was killed, and declared dead."""

    def __init__(self, storm: Storm, chance: random.Random) -> None:
        self.storm = storm
        self.kills: list[list[float]] = [[] for _ in range(storm.replicas)]
        self.declared: list[float] = []
        now = 0.0
        while (now := now + chance.uniform(*storm.pause)) < storm.seconds:
            chance.choice(self.kills).append(now)
            self.declared.append(now + chance.uniform(*storm.dead_after))
        self._ordered = sorted(self.declared)
        self._dead_at = dict(zip(sorted(at for slot in self.kills for at in slot), self.declared, strict=True))

    def dies(self, slot: int, since: float, seconds: float) -> float | None:
        """The instant at which that worker is declared dead, if it is killed within these seconds."""
        kills = self.kills[slot]
        place = bisect_left(kills, since)
        return self._dead_at[kills[place]] if place < len(kills) and kills[place] < since + seconds else None

    def deaths(self, since: float, until: float) -> int:
        return bisect_right(self._ordered, until) - bisect_left(self._ordered, since)


def live(weather: Weather, chance: random.Random, began: float, seconds: Callable[[], float]) -> tuple[int, Suspicion]:
    """An innocent item, from its first claim to its end: at how many deaths it was in hand, and the worst that it was
    suspected of. Each time it is taken at once by any worker, and done in `seconds` unless that worker is killed."""
    now, first, seen, verdict = began, None, Evidence(0, 0), NONE
    worst: Suspicion = NONE
    while verdict < POISON:
        died = weather.dies(chance.randrange(weather.storm.replicas), now, seconds())
        if died is None:
            break
        now, first = died, first or died
        solo, group = seen.solo_deaths + (verdict is ALONE), seen.group_deaths + (verdict in (TENTH, HUNDREDTH))
        seen = Evidence(seen.crashes + 1, weather.deaths(first, now) - solo, group, solo)
        verdict = judge(seen)
        worst = max(worst, verdict)
    return seen.crashes, worst


# Kills, what an item takes, and at how many deaths the unluckiest is in hand. The rates of `make chaos` on a fast and
# on a slow machine come first: five used to be enough to be given up.
STORMS = {
    "a kill every 1.5 s": (Storm((0.4, 2.6)), (0.1, 0.6), 4),
    "on slow cores": (Storm((0.4, 4.2)), (0.3, 3.0), 5),
    "long calls": (Storm((5.0, 60.0)), (5.0, 60.0), 5),
    "two workers": (Storm((2.0, 20.0), replicas=2), (0.1, 5.0), 3),
    "one worker": (Storm((2.0, 60.0), replicas=1), (0.1, 5.0), 3),
}


@pytest.mark.parametrize(("storm", "takes", "crashes"), STORMS.values(), ids=STORMS)
def test_random_kills_convict_no_innocent(storm: Storm, takes: tuple[float, float], crashes: int) -> None:
    chance = random.Random(7)  # noqa: S311 - repeatable, not secret
    weather = Weather(storm, chance)
    lives = [
        live(weather, chance, chance.uniform(0, storm.seconds / 2), lambda: chance.uniform(*takes))
        for _ in range(60_000)
    ]
    worst = Counter(verdict for _, verdict in lives)
    assert max(died for died, _ in lives) >= crashes, "no item was in hand at deaths: the test proves nothing"
    assert worst[POISON] == 0, worst
    assert worst[NONE] > 0.98 * len(lives), "the others are taken over at full pace"
