"""Small real flows for the engine's tests: work is an ordinary function, targets come from the run's input."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

from pydantic import BaseModel

from ecluse.base.errors import NotSentError, PermanentError, TransientError
from ecluse.db.connect import Connection, Pool
from ecluse.db.connect import pool as open_pool
from ecluse.engine import (
    AbsoluteWrite,
    Done,
    Flow,
    Item,
    KeyedWrite,
    Lane,
    NewItem,
    Order,
    Priority,
    Result,
    RetryPolicy,
    Run,
    Stage,
    Start,
    WorkContext,
    start_runs,
)
from ecluse.engine.kit import Kit
from ecluse.engine.lead.story import Story
from ecluse.engine.model.item import ClaimedItem
from ecluse.engine.runs.stages import fan_out
from ecluse.engine.work.claim import Claimant, SlotsLeft, claim_items
from tests.support.runs import start_run, wait_for_run

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


async def started(kit: Kit, f: Flow, targets: list[str], key: str = "key") -> int:
    return (await start_run(kit, Start(f, key, input={"targets": targets}))).run.id


async def run_to_end(kit: Kit, flow: Flow, targets: Sequence[str], key: str = "key", **options: Any) -> dict[str, Any]:
    payload = options.pop("payload", None)
    given = {"targets": list(targets), "payload": payload}
    started = await start_run(kit, Start(flow, key, input=given, **options))
    return await wait_for_run(kit, started.run.id, PATIENCE)


FINISH = """
WITH done AS (
    UPDATE items SET status = 'succeeded', executions = executions + 1, finished_at = ecluse_now()
    WHERE id = ANY(%s) AND claim_id IS NOT NULL AND status = 'open' RETURNING claim_id, finished_at)
UPDATE claims c SET succeeded = c.succeeded + n.n, done_at = n.at
FROM (SELECT claim_id, count(*) AS n, max(finished_at) AS at FROM done GROUP BY 1) n
WHERE c.id = n.claim_id
"""


# Other tests may use other databases of the server.
END_LISTENERS = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND query LIKE 'LISTEN _ecluse%'
"""
NO_SHARE = SlotsLeft(1_000_000, [], [], [])


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
        priority: Priority = "normal",
        one: Stage | None = None,
        name: str = "test",
    ) -> Run:
        """A running run with its items fanned out; a negative delay gives them an earlier place in line, a positive one
        makes them due later as well."""
        wanted = keys(items) if isinstance(items, int) else items
        one = one or stage(lane=Lane(lane))
        async with self.pool.connection() as connection:
            start = Start(flow(one, name), f"run-{next(self._serial)}", tenant_id=tenant)
            async with connection.transaction():  # a worker of the test must not find it queued, and lead it
                run = (await start_runs(connection, [start]))[0].run
                await connection.execute(
                    "UPDATE runs SET status = 'running', state = 'running', started_at = ecluse_now() WHERE id = %s",
                    (run.id,),
                )
            new = [NewItem(item) if isinstance(item, str) else item for item in wanted]
            await fan_out(connection, run, one, new, chunk=1000, priority=priority)
            if delay:
                await connection.execute(
                    "UPDATE items SET order_at = order_at + %s, due_at = due_at + %s WHERE run_id = %s",
                    (timedelta(seconds=delay), timedelta(seconds=max(delay, 0)), run.id),
                )
        return run

    async def claim(
        self, *lanes: int, room: int = 20, replica: str = "one", free: Sequence[int] = ()
    ) -> list[ClaimedItem]:
        """From capped `lanes` (any lane may be treated as one) and from lanes `free` of caps."""
        work = [f"{flow}/{stage}" for flow in ("test", "other") for stage in ("work", "second", "heavy")]
        who = Claimant(replica, work, [3 if name.endswith("heavy") else 1 for name in work])
        async with self.pool.connection() as connection:
            await connection.execute(
                "INSERT INTO replicas (id, host, pid) VALUES (%s, 'here', 1) ON CONFLICT DO NOTHING", (replica,)
            )
            taken = await claim_items(connection, who, list(lanes), room, capped=True, left=NO_SHARE) if lanes else []
            if free and len(taken) < room:
                taken += await claim_items(connection, who, list(free), room - len(taken), capped=False, left=NO_SHARE)
        return taken

    async def finish(self, taken: Sequence[ClaimedItem]) -> None:
        async with self.pool.connection() as connection:
            await connection.execute(FINISH, ([one.item.id for one in taken],))


@asynccontextmanager
async def open_board(dsn: str) -> AsyncIterator[Board]:
    async with open_pool(dsn, size=12) as pool:
        yield Board(pool)


async def until(true: Callable[[], Any], seconds: float = 30) -> Any:
    """Wait for it, and say what it came to."""
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, "it did not come true"
        await asyncio.sleep(0.02)
    return found


# As when another replica has found the holder dead: its items are opened again, at once.
TAKE_OVER = """
WITH c AS (UPDATE claims SET fence = fence + 1, released = released + in_flight WHERE in_flight > 0 RETURNING id),
i AS (UPDATE items SET claim_id = NULL WHERE claim_id IN (SELECT id FROM c) AND status = 'open')
SELECT pg_notify('ecluse_work', '')
"""

QUIET = timedelta(milliseconds=300)
WANTED, BEFORE, ANOTHER_CLIENTS = "2.00", "1.00", "9.99"

# How a write may go: whether it is applied, and what its caller gets instead of an answer.
GOES: dict[str, tuple[bool, Callable[[], Exception] | None]] = {
    "well": (True, None),
    "applied, 500": (True, lambda: TransientError("500", code="VENDOR_ERROR_500")),
    "500": (False, lambda: TransientError("500", code="VENDOR_ERROR_500")),
    "throttled": (False, lambda: TransientError("429", code="THROTTLED", retry_after=0, ambiguous=False)),
    "not sent": (False, lambda: NotSentError("connection refused")),
    "refused": (False, lambda: PermanentError("422", code="REFUSED")),
    "key in use": (False, lambda: TransientError("409", code="CONFLICT")),
    "applied, bug": (True, lambda: KeyError("colour")),
    "bug": (False, lambda: KeyError("colour")),
    "another client, 500": (False, lambda: TransientError("500", code="VENDOR_ERROR_500")),
    "another client, throttled": (False, lambda: TransientError("429", retry_after=0, ambiguous=False)),
    "another client": (True, None),
    "the one before arrives": (True, None),
    "applied, hangs": (True, None),
    "hangs": (False, None),
    "arrives late, hangs": (False, None),
}


class Shop:
    """A vendor in the test's own process, with a ledger. Everything has a price, which can be read and set; a thing is
    made once per key. An item's n-th write goes as the n-th word of its script says, and well after that."""

    def __init__(self, script: Mapping[str, Sequence[str]] | Sequence[str] = (), *, conditional: bool = False) -> None:
        self.script = script
        self.conditional = conditional  # a price is only set if it has not changed since it was read
        self.prices: dict[str, str] = defaultdict(lambda: BEFORE)
        self.versions: Counter[str] = Counter()
        self.made: dict[str, Any] = {}
        self.applied: list[str] = []  # the ledger: what was really done, by item
        self.writes: list[tuple[str, str, float]] = []  # and what arrived: item, the order's key, when
        self.reads: list[tuple[str, float]] = []
        self.down: set[str] = set()  # cannot be read
        self.late = 0.2  # of what arrives late: less than the quiet period
        self.watch: Callable[[Item, str], Awaitable[None]] | None = None  # sees every call before it is dealt with

    def arrived(self, key: str) -> int:
        return sum(one == key for one, _, _ in self.writes)

    def absolute(self, quiet: timedelta = QUIET, **options: Any) -> Stage:
        """A stage that sets prices: class C2."""
        write = AbsoluteWrite(wanted=_wanted, read=self._read, send=self._set, quiet=quiet)
        return stage(work=write, **options)  # type: ignore[arg-type]

    def keyed(self, quiet: timedelta = QUIET, remembered: timedelta = timedelta(hours=24), **options: Any) -> Stage:
        """A stage that makes things: class C1."""
        write = KeyedWrite(wanted=_wanted, send=self._make, quiet=quiet, remembered=remembered)
        return stage(work=write, **options)  # type: ignore[arg-type]

    def change(self, key: str, price: str) -> None:
        self.prices[key] = price
        self.versions[key] += 1

    async def _read(self, _: WorkContext, item: Item) -> Any:
        self.reads.append((item.key, time.monotonic()))
        if self.watch is not None:
            await self.watch(item, "read")
        if item.key in self.down:
            raise TransientError("503", code="DOWN")
        return {"price": self.prices[item.key], "version": self.versions[item.key]}

    async def _set(self, _: WorkContext, item: Item, order: Order) -> Any:
        async def apply() -> Any:
            if goes.startswith("another client"):
                self.change(item.key, ANOTHER_CLIENTS)
            if goes == "the one before arrives":
                self._done(item, order)
            if self.conditional and order.before["version"] != self.versions[item.key]:
                raise PermanentError("412", code="PRECONDITION_FAILED", ambiguous=True)
            if applies:
                self._done(item, order)
            return {"price": self.prices[item.key], "version": self.versions[item.key]}

        goes, applies = await self._arrives(item, order)
        return await self._answer(goes, apply, lambda: self._done(item, order))

    async def _make(self, _: WorkContext, item: Item, order: Order) -> Any:
        async def apply() -> Any:
            return make() if applies else None

        def make() -> Any:
            if order.key not in self.made:
                self.applied.append(item.key)
                self.made[order.key] = {"id": f"{item.key}-{len(self.made)}", **order.wanted}
            return self.made[order.key]

        goes, applies = await self._arrives(item, order)
        return await self._answer(goes, apply, make)

    async def _arrives(self, item: Item, order: Order) -> tuple[str, bool]:
        script = self.script.get(item.key, ()) if isinstance(self.script, Mapping) else self.script
        before = self.arrived(item.key)
        goes = script[before] if before < len(script) else "well"
        self.writes.append((item.key, order.key, time.monotonic()))
        if self.watch is not None:
            await self.watch(item, "write")
        return goes, GOES[goes][0]

    async def _answer(self, goes: str, apply: Callable[[], Awaitable[Any]], later: Callable[[], Any]) -> Any:
        answer = await apply()
        if (error := GOES[goes][1]) is not None:
            raise error()
        if goes == "arrives late, hangs":
            asyncio.get_running_loop().call_later(self.late, later)
        if goes.endswith("hangs"):
            await asyncio.sleep(60)
        return answer

    def _done(self, item: Item, order: Order) -> None:
        self.applied.append(item.key)
        self.change(item.key, order.wanted["price"])


def _wanted(item: Item) -> Any:
    return {"price": item.payload or WANTED}
