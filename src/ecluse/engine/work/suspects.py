"""Suspects: items that may crash the worker that executes them. One death of a worker that held an item is no evidence:
most deaths have another cause, and a worker holds hundreds of items. An item becomes a suspect if it was held at nearly
every death since the first death of one of its workers. It is then run in small groups, later alone, and only deaths of
workers that ran it alone make it poison.

At each take-over from a dead worker, SQL counts the deaths and `judge` decides; the decision is stored with the
item."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from ecluse.db.connect import Connection
from ecluse.db.query import fetch_rows
from ecluse.engine.work.claim import AHEAD_SECONDS, Claimant
from ecluse.engine.work.worker_slots import WorkerSlots

POINTED_CRASHES = 3  # fewer are a coincidence
POINTED_SHARE = 0.8  # of the workers that died since its first crash
# In any case a suspect: where there are several culprits, each explains only a part of the deaths.
POINTED_ANYHOW = 8
SOLO_DEATHS = 3  # make it poison; one more for each worker that died without it, up to:
MOST_SOLO_DEATHS = 6
FEW = 3  # if no more suspects wait, each is run alone at once
QUERY_SECONDS = 1.0  # between two queries for waiting suspects


class Suspicion(IntEnum):
    """How an item is run, given the deaths of workers that held it; stored in `items.suspicion`."""

    NONE = 0
    TENTH = 1  # a worker holds suspects of this kind in a tenth of its slots, beside other work
    HUNDREDTH = 2
    ALONE = 3
    POISON = 4  # not executed again; a write of it in doubt is read back, alone
    DEADLY = 5  # the read-back killed another worker: not read back either


@dataclass(frozen=True, slots=True)
class Evidence:
    """Deaths of workers that could have claimed an item, counted since the first death of a worker that held it.
    Workers that died while another item ran alone are left out: their deaths say nothing about this item."""

    crashes: int  # of workers that held it
    deaths: int  # of workers that held it or not, without those that ran it alone
    group_deaths: int = 0  # of workers that held it in a small group
    solo_deaths: int = 0  # of workers that ran it alone

    @property
    def without_it(self) -> int:
        """The number of deaths of workers that did not hold the item."""
        return max(0, self.deaths - (self.crashes - self.solo_deaths))


def judge(seen: Evidence) -> Suspicion:
    """Decide how an item is run from now on, after a worker that held it has died."""
    convicting = min(SOLO_DEATHS + seen.without_it, MOST_SOLO_DEATHS)
    if seen.solo_deaths >= convicting:
        return Suspicion.POISON if seen.solo_deaths == convicting else Suspicion.DEADLY
    if seen.solo_deaths or seen.group_deaths > 1:
        return Suspicion.ALONE
    if seen.group_deaths:
        return Suspicion.HUNDREDTH
    always_there = seen.crashes >= POINTED_CRASHES and seen.crashes >= POINTED_SHARE * seen.deaths
    return Suspicion.TENTH if always_there or seen.crashes >= POINTED_ANYHOW else Suspicion.NONE


def group_sizes(waiting: Mapping[int, int], slots: int) -> dict[int, int]:
    """Return, per kind of suspects (`Suspicion`), the number that a worker with `slots` slots may hold at once; 1: the
    suspect runs alone, without any other item. `waiting`: the number of waiting suspects per kind."""
    few = sum(waiting.values()) <= FEW
    sizes = {Suspicion.TENTH: slots // 10, Suspicion.HUNDREDTH: slots // 100}
    return {kind: 1 if few else max(1, sizes.get(Suspicion(kind), 1)) for kind in sorted(waiting)}


# ── Waiting suspects ───────────────────────────────────────────────────────────────────────────────────────────────

WAITING = """
SELECT i.suspicion, count(*) FROM items i JOIN lanes l ON l.id = i.lane_id
WHERE i.claim_id IS NULL AND i.suspicion > 0 AND i.due_at <= ecluse_now() AND NOT i.permanent
  AND i.flow || '/' || i.stage = ANY(%(work)s) AND l.base = ANY(%(bases)s)
  AND l.paused_at IS NULL AND (l.held_until IS NULL OR l.held_until <= ecluse_now())
  AND l.next_free_at <= ecluse_now() + %(ahead)s * interval '1 second'
  AND (l.max_in_flight IS NULL OR l.max_in_flight > (SELECT coalesce(sum(c.in_flight), 0) FROM claims c
                                                     WHERE c.lane_id = l.id AND c.in_flight > 0))
GROUP BY 1
"""
# Workers that could run a suspect alone sooner than this one: they hold fewer items, and are neither silent nor running
# one already.
SOONER = """
WITH crew AS (
    SELECT r.id, (SELECT coalesce(sum(c.in_flight), 0) FROM claims c WHERE c.replica_id = r.id AND c.in_flight > 0) AS n
    FROM replicas r
    WHERE r.state = 'live' AND (r.id = %(replica)s OR r.work && %(work)s
        AND r.beat_at > clock_timestamp() - interval '3 seconds' AND NOT EXISTS (
            SELECT 1 FROM claims c WHERE c.replica_id = r.id AND c.in_flight > 0 AND c.apart = 'alone')))
SELECT count(*) FROM crew o JOIN crew me ON me.id = %(replica)s WHERE (o.n, o.id) < (me.n, me.id)
"""


class SuspectClaims:
    """Decides which claims a worker may make while suspects wait. A suspect that must run alone is claimed only when
    the worker holds no item, and nothing else is claimed while it runs."""

    def __init__(self, claimant: Claimant, slots: int) -> None:
        self._claimant = claimant
        self._slots = slots
        self.limits: dict[int, int] = {}  # per kind of waiting suspects, how many this worker may hold
        self.runs_alone = False
        self._emptying = False  # claim nothing until the worker holds no item, to run a suspect alone
        self._query_at = 0.0

    async def query(self, connection: Connection, bases: list[str], now: float) -> None:
        """Count the suspects that wait in lanes of these bases and that this worker could claim, from which `allowed`
        then decides. Does nothing within QUERY_SECONDS of the previous query. `now` is the monotonic clock."""
        if now < self._query_at:
            return
        claimant = self._claimant
        parameters = {"work": claimant.work, "bases": bases, "ahead": AHEAD_SECONDS}
        waiting = dict(await fetch_rows(connection, WAITING, parameters, prepare=True))
        self.limits = group_sizes(waiting, self._slots)
        alone = sum(waiting[kind] for kind, most in self.limits.items() if most == 1)
        # As many workers empty their slots as there are suspects to run alone: the workers that hold the fewest items.
        # Other workers go on claiming.
        self._emptying = False
        if alone:
            me = {"replica": claimant.replica, "work": claimant.work}
            ((sooner,),) = await fetch_rows(connection, SOONER, me, prepare=True)
            self._emptying = sooner < alone
        self._query_at = now + QUERY_SECONDS

    def allowed(self, slots: WorkerSlots, room: int, *, holds_items: bool) -> list[tuple[Claimant, int]]:
        """Return the claims that the worker may make now, each with its largest number of items: claims of suspects
        first, then of all other items; empty if it may claim nothing. `room`: the number of items that the worker
        wants; `holds_items`: it holds items whose results are not stored yet."""
        self.runs_alone = self.runs_alone and holds_items
        alone = [kind for kind, most in self.limits.items() if most == 1]
        if self.runs_alone or (alone and holds_items and self._emptying):
            return []
        claims = []
        if alone and not holds_items:
            claims.append((self._claimant._replace(least=min(alone), most=max(Suspicion), apart="alone"), 1))
        if self.limits:
            held = Counter(claimed.suspicion for claimed in slots.claimed)
            for kind, most in self.limits.items():
                if most > 1:
                    claims.append((self._claimant._replace(least=kind, most=kind, apart="group"), most - held[kind]))
        return [*claims, (self._claimant, room)]
