"""Small real flows for the engine's tests: work is an ordinary function, targets come from the run's input."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

from pydantic import BaseModel

from ecluse.db.connect import Connection, Pool
from ecluse.db.connect import pool as open_pool
from ecluse.engine import (
    Done,
    Flow,
    Item,
    Kit,
    Lane,
    NewItem,
    Result,
    RetryPolicy,
    Run,
    Stage,
    Start,
    Story,
    WorkContext,
    insert_run,
)
from ecluse.engine.claim import Claimant, Taken, claim_capped, claim_free
from ecluse.engine.fan_out import fan_out

QUICK = RetryPolicy(executions=3, base=0.01)
PATIENCE = timedelta(seconds=30)


class Targets(BaseModel):
    targets: list[str] = []
    payload: Any = None


async def given_targets(_: Connection, run: Run) -> Sequence[NewItem]:
    return [NewItem(key, payload=run.input["payload"]) for key in run.input["targets"]]


async def succeed(_: WorkContext, item: Item) -> Result:
    return Done({"key": item.key})


def stage(work: Callable[[WorkContext, Item], Awaitable[Result]] = succeed, **options: Any) -> Stage:
    base = Stage("work", Lane("lane"), work, retry=QUICK, max_wait=timedelta(seconds=20), poll=timedelta(seconds=5))
    return replace(base, **options)


def flow(one: Stage, name: str = "test", **options: Any) -> Flow:
    """select, fan out, gate: the story of one stage."""

    async def story(run: Story) -> None:
        await run.select(given_targets)
        await run.fan_out(one, given_targets)
        await run.gate(one)

    return Flow(**{"name": name, "stages": (one,), "story": story, "input": Targets, **options})


def keys(count: int) -> list[str]:
    return [f"t{n:05d}" for n in range(count)]


async def run_to_end(kit: Kit, flow: Flow, targets: Sequence[str], key: str = "key", **options: Any) -> dict[str, Any]:
    payload = options.pop("payload", None)
    given = {"targets": list(targets), "payload": payload}
    started = await kit.start_run(Start(flow, key, input=given, **options))
    return await kit.wait_for_run(started.run.id, PATIENCE)


FINISH = """
WITH done AS (
    UPDATE items SET status = 'succeeded', executions = executions + 1, finished_at = ecluse_now()
    WHERE id = ANY(%s) AND claim_id IS NOT NULL AND status = 'open' RETURNING claim_id)
UPDATE claims c SET succeeded = c.succeeded + n.n FROM (SELECT claim_id, count(*) AS n FROM done GROUP BY 1) n
WHERE c.id = n.claim_id
"""


class Board:
    """Lanes, runs and waiting items of a database without an engine, claimed by hand and finished by plain SQL."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._serial = itertools.count(1)

    async def lane(self, name: str = "lane", **caps: float) -> int:
        async with self.pool.connection() as connection:
            cursor = await connection.execute(
                "INSERT INTO lanes (name, max_in_flight, max_per_key, per_second, burst) VALUES (%s, %s, %s, %s, %s)"
                " RETURNING id",
                (
                    name,
                    *(caps.get(cap) for cap in ("max_in_flight", "max_per_key", "per_second")),
                    caps.get("burst", 1),
                ),
            )
            row = await cursor.fetchone()
            assert row
            return int(row[0])

    async def run(
        self,
        items: int | Sequence[str | NewItem] = (),
        *,
        lane: str = "lane",
        tenant: str = "default",
        delay: float = 0,
        one: Stage | None = None,
        name: str = "test",
    ) -> Run:
        """A running run with its items fanned out; a negative delay makes them due earlier."""
        wanted = keys(items) if isinstance(items, int) else items
        one = one or stage(lane=Lane(lane))
        async with self.pool.connection() as connection:
            start = Start(flow(one, name), f"run-{next(self._serial)}", tenant_id=tenant)
            run = (await insert_run(connection, start)).run
            await connection.execute(
                "UPDATE runs SET status = 'running', state = 'running', started_at = ecluse_now() WHERE id = %s",
                (run.id,),
            )
            new = [NewItem(item) if isinstance(item, str) else item for item in wanted]
            await fan_out(connection, run, one, new, chunk=1000, delay=timedelta(seconds=delay))
        return run

    async def claim(self, *lanes: int, room: int = 20, replica: str = "one", free: Sequence[int] = ()) -> list[Taken]:
        """From capped `lanes` (any lane may be treated as one) and from lanes `free` of caps."""
        who = Claimant(replica, [f"{flow}/{stage}" for flow in ("test", "other") for stage in ("work", "second")])
        async with self.pool.connection() as connection:
            await connection.execute(
                "INSERT INTO replicas (id, host, pid) VALUES (%s, 'here', 1) ON CONFLICT DO NOTHING", (replica,)
            )
            taken = await claim_capped(connection, who, list(lanes), room) if lanes else []
            if free and len(taken) < room:
                taken += await claim_free(connection, who, list(free), room - len(taken))
        return taken

    async def finish(self, taken: Sequence[Taken]) -> None:
        async with self.pool.connection() as connection:
            await connection.execute(FINISH, ([one.item.id for one in taken],))


@asynccontextmanager
async def open_board(dsn: str) -> AsyncIterator[Board]:
    async with open_pool(dsn, size=12) as pool:
        yield Board(pool)
