"""How long it takes until others go on, by the database's own clock."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from tests.faults.world import Replica, World

HELD = """
SELECT i.id AS item_id, i.claim_id FROM claims c JOIN items i
    ON i.run_id = c.run_id AND i.stage = c.stage AND i.claim_id = c.id AND i.status = 'open'
WHERE c.replica_id = %s AND c.in_flight > 0
"""
# By whom it is claimed next; an end of the run that closes it is no take-over.
RECLAIMED = """
SELECT w.at, c.replica_id FROM witness w JOIN claims c ON c.id = w.claim_id JOIN replicas r ON r.id = c.replica_id
WHERE w.item_id = %s AND w.at > %s AND w.claim_id <> %s ORDER BY w.at LIMIT 1
"""
STILL_OPEN = "SELECT count(*) FROM items WHERE id = ANY(%s) AND status = 'open'"
PROGRESS = """
SELECT min(at) FROM (SELECT min(taken_at) AS at FROM claims WHERE taken_at > %s
                     UNION ALL SELECT min(finished_at) FROM items WHERE finished_at > %s) p
"""
EXECUTOR = "SELECT workflow_uuid, executor_id, status FROM dbos.workflow_status WHERE status IN ('PENDING', 'ENQUEUED')"


def held_by(world: World, replica: Replica) -> list[dict[str, Any]]:
    """The open items in its hands."""
    return world.ask(HELD, replica.id) if replica.id is not None else []


def progress_since(world: World, since: datetime) -> datetime | None:
    """When the first item was claimed or finished after that."""
    rows = world.ask(PROGRESS, since, since)
    first: datetime | None = rows[0]["min"]
    return first


@dataclass(frozen=True)
class TakeOver:
    """An item that was in flight at a replica when it was killed."""

    item: int
    claim: int
    killed_at: datetime

    def seconds(self, world: World) -> float | None:
        """Until its next claim. None if it had none: its result was on its way to the database when the kill came."""
        rows = world.ask(RECLAIMED, self.item, self.killed_at, self.claim)
        return (rows[0]["at"] - self.killed_at).total_seconds() if rows else None


def take_overs(world: World, victim: Replica, killed_at: datetime) -> list[TakeOver]:
    """Right after the kill; the world must `watch_claims`."""
    return [TakeOver(row["item_id"], row["claim_id"], killed_at) for row in held_by(world, victim)]


def restart_database(world: World, mode: Literal["fast", "immediate"], away: float) -> float:
    """Seconds from the instant at which it is up until work goes on."""
    world.postgres.stop(mode)
    time.sleep(away)
    world.postgres.up()
    up_at = world.wait_for(world.now, "the database answers", 20)
    first = world.wait_for(lambda: progress_since(world, up_at), "work goes on after the restart")
    return float((first - up_at).total_seconds())


@dataclass(frozen=True)
class HandOver:
    code: int
    exit_seconds: float
    claims: int  # items given back
    claim_seconds: float  # until the first of them is claimed by another replica
    workflow_seconds: float  # until the last of its runs is led by another replica

    @property
    def seconds(self) -> float:
        return max(self.claim_seconds, self.workflow_seconds)


def leader(world: World) -> Replica | None:
    """Return a replica that leads a run now; None if there is none."""
    leading = {row["executor_id"] for row in world.ask(EXECUTOR) if row["status"] == "PENDING"}
    return next((one for one in world.living if one.id in leading), None)


def hand_over(world: World, leaving: Replica) -> HandOver:
    """Stop a replica by SIGTERM, and measure until others have its items and runs. The world must `watch_claims` and
    `leaving` be busy."""
    led = {row["workflow_uuid"] for row in world.ask(EXECUTOR) if row["executor_id"] == leaving.id}
    held, asked_at, began = held_by(world, leaving), world.now(), time.monotonic()
    leaving.signal(signal.SIGTERM)

    def led_elsewhere() -> bool:
        others = {r["workflow_uuid"] for r in world.ask(EXECUTOR) if r["executor_id"] == leaving.id}
        waiting = {r["workflow_uuid"] for r in world.ask(EXECUTOR) if r["status"] == "ENQUEUED"}
        return not led & (others | waiting)

    world.wait_for(led_elsewhere, "its runs are led by another replica", 20)
    workflow_seconds = time.monotonic() - began
    code = leaving.child.wait(20)
    exit_seconds = time.monotonic() - began
    given = [TakeOver(row["item_id"], row["claim_id"], asked_at) for row in held]
    # On a slow machine it may have finished all of it before it left.
    world.wait_for(
        lambda: (
            any(one.seconds(world) is not None for one in given)
            or not world.one(STILL_OPEN, [one.item for one in given])
        ),
        "what was given back is claimed",
        20,
    )
    seconds = [found for one in given if (found := one.seconds(world)) is not None]
    return HandOver(code, exit_seconds, len(seconds), min(seconds, default=0.0), workflow_seconds)
