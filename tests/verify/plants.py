"""What plants a fault into a world: changes of rows, writes at the vendor, warnings."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from tests.verify.world import World

Plant = Callable[[World], object]


class Fault(NamedTuple):
    invariant: str
    name: str
    says: str  # part of the message
    plant: Plant


CRASHED = "error_code = 'WORKER_CRASHED', crashes = 9, solo_deaths = 2, first_crash_at = now()"


def then(*plants: Plant) -> Plant:
    def plant(world: World) -> None:
        for one in plants:
            one(world)

    return plant


def of(name: str, table: str, sets: str) -> Plant:
    return lambda world: world.change(name, table, sets)


def sql(statement: str) -> Plant:
    """Names of runs stand for their ids."""

    def plant(world: World) -> None:
        assert world.db.execute(statement, world.runs).rowcount > 0, statement  # type: ignore[arg-type]

    return plant


def put(sku: str, price: str, *, key_of: str) -> Plant:
    return lambda world: world.put(sku, price, Idempotency_Key=str(world.effects[key_of]))


def third_party(sku: str, price: str) -> Plant:
    return lambda world: world.put(sku, price, X_Client="another client")


def resend(key: str) -> Plant:
    return lambda world: world.resend(key)


def settled(key: str, state: str) -> Plant:
    return lambda world: world.settle(key, state)


def warn(target: str, *, of_effect: bool) -> Plant:
    return of(target, "outcomes", f"effect_may_exist = {of_effect}")


def item_reopened(key: str) -> Plant:
    """As a further round does it, counters and all."""
    return then(
        of(key, "claims", "failed = failed - 1, released = released + 1"),
        of(key, "items", "status = 'open', claim_id = NULL, finished_at = NULL"),
    )


def item_failed_after_all(key: str) -> Plant:
    return then(
        of(key, "claims", "succeeded = succeeded - 1, failed = failed + 1"),
        of(key, "items", "status = 'failed'"),
        lambda world: world.attempt(key, 1),
    )


def write_of_former_round(world: World, state: str) -> None:
    """SKU-00001 succeeded in round 1; its write of round 0 stands like this."""
    world.resend("SKU-00001")
    world.change("SKU-00001", "items", "round = 1")
    world.change("SKU-00001", "effects", "round = 1, sends = 1")
    world.effect(world.runs["ended"], "former", "C2", {"price": "12.50"})
    world.settle("former", state)
    world.change("former", "effects", "target = 'SKU-00001', item_id = %(item)s", item=world.items["SKU-00001"])


def run_unclosed(world: World) -> None:
    world.change("chore", "runs", "status = 'running', state = 'running', ended_at = NULL, end_cause = NULL")
    world.change("chore", "stages", "ended_at = NULL")
    world.change("chore", "items", "finished_at = finished_at - interval '2 minutes'")
    sql("DELETE FROM run_log WHERE run_id = %(chore)s AND message = 'running -> completed'")(world)


def move(world: World, message: str) -> None:
    world.insert("run_log", run_id=world.runs["ended"], at=world.now, level="info", message=message)


def with_retry_after(seconds: float) -> Plant:
    """A Retry-After by the vendor, long enough ago for every replica to know it."""

    def plant(world: World) -> None:
        world.sandbox.set_faults([{"kind": "throttle", "retry_after": seconds, "times": 1}])
        assert world.read("SKU-00001") == 429
        time.sleep(0.7)

    return plant


NOT_BEGUN = sql("DELETE FROM run_log WHERE run_id = %(ended)s AND message = 'queued -> running'")
ENDED_OTHERWISE = sql(
    "UPDATE run_log SET message = 'running -> completed' WHERE run_id = %(ended)s AND message = 'running -> partial'"
)
OVERDUE = "deadline_at = now() - interval '2 minutes'"
WORKFLOW = "dbos.workflow_status"
