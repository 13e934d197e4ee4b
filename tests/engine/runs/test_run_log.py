"""The same failure of many items is one line, whoever commits it and when; the line names whom it is about."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import psycopg
import pytest

from ecluse.base.errors import PermanentError, TransientError
from ecluse.engine import Done, Item, Result, Start, WorkContext
from ecluse.insight import run_queries
from tests.support.engine_flows import PATIENCE, flow, keys, run_to_end, stage
from tests.support.runs import start_run, wait_for_run


@pytest.fixture
async def connection(dsn):
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        yield connection


async def failures(connection, run_id):
    rows = await run_queries.list_log(connection, "default", run_id, limit=200, offset=0)
    return {row["message"]: row for row in rows if row["targets"]}


@pytest.mark.req("ENG-23")
async def test_equal_failures_are_one_line_that_counts_and_names_them(start_kit, connection, one):
    async def work(_: WorkContext, item: Item) -> Result:
        number = int(item.key[1:])
        await asyncio.sleep(0.01 * (number % 3))
        if number < 28:
            raise PermanentError("llm: 503 service unavailable", code="DOWN")
        if number < 30:
            raise PermanentError("llm: 503 service unavailable", code="OTHER")
        if number == 30:
            raise PermanentError("no transcript", code="NO_TRANSCRIPT")
        return Done()

    kit = await start_kit(f := flow(stage(work)), hands=4)
    row = await run_to_end(kit, f, names := keys(40))
    assert one("SELECT count(DISTINCT at) FROM attempts WHERE error_code = 'DOWN'") > 1, "in several commits"
    found = await failures(connection, row["id"])
    (many,) = [line for line in found.values() if line["count"] == 28]
    assert many["message"] == f"28 × llm: 503 service unavailable ({', '.join(many['targets'])}, …)"  # noqa: RUF001
    assert (len(many["targets"]), set(many["targets"]) < set(names[:28])) == (5, True)
    assert many["data"]["code"] == "DOWN"
    assert many["event_id"].startswith(f"test-{row['id']}-work-t")
    assert many["last_at"] > many["at"]
    two = "2 × llm: 503 service unavailable (t00028, t00029)"  # noqa: RUF001
    assert set(found) == {many["message"], two, "no transcript (t00030)"}
    assert sum(line["count"] for line in found.values()) == row["failed"] == 31


async def test_replicas_that_fail_the_same_way_at_once_add_to_the_same_lines(start_kit, connection):
    async def work(_: WorkContext, item: Item) -> Result:
        raise PermanentError(f"sentence {int(item.key[1:]) % 7}", code="NO")

    one, two = [await start_kit(f := flow(stage(work)), hands=20) for _ in range(2)]
    started = [await start_run(one, Start(f, f"key-{n}", input={"targets": keys(300)})) for n in range(2)]
    for start in started:
        assert (await wait_for_run(two, start.run.id, PATIENCE))["failed"] == 300
        found = await failures(connection, start.run.id)
        assert (len(found), sum(line["count"] for line in found.values())) == (7, 300)


async def test_who_fails_again_in_a_further_round_is_named_once(start_kit, connection):
    async def work(_: WorkContext, item: Item) -> Result:
        raise TransientError("down", code="DOWN", ambiguous=False)

    again = stage(work, rounds=1, poll=timedelta(seconds=0.1))
    kit = await start_kit(f := flow(again))
    row = await run_to_end(kit, f, ["a"])
    assert set(await failures(connection, row["id"])) == {"2 × down (a)"}  # noqa: RUF001
