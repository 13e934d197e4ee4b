"""Small real flows for the engine's tests: work is an ordinary function, targets come from the run's input."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from pydantic import BaseModel

from ecluse.db.connect import Connection
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
)

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
