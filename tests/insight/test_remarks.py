"""Remarks to why a run waits: its time limit."""

from __future__ import annotations

import pytest

from ecluse.insight.remarks import remarks
from ecluse.insight.waiting import why_run
from tests.support.engine_flows import open_board

STAGE = """
INSERT INTO stages (run_id, stage, budget, started_at, deadline_at, progress_at)
VALUES (%s, 'work', 1, now(), ecluse_now() + interval '1 minute', now())
"""
REPLICA = "INSERT INTO replicas (id, host, pid, work, hands) VALUES ('one', 'h', 1, '{test/work}', 10)"


@pytest.fixture
async def board(dsn):
    async with open_board(dsn) as board:
        yield board


async def told(board, run):
    async with board.pool.connection() as connection:
        return await remarks(connection, run.id, await why_run(connection, run.tenant_id, run.id))


@pytest.mark.req("ENG-53")
@pytest.mark.parametrize(("due", "late"), [("30 seconds", False), ("2 minutes", True)])
async def test_what_starts_after_the_time_limit_of_its_stage_is_said_to_fail(board, query, due, late):
    await board.lane()
    run = await board.run(["a"])
    query(REPLICA)
    query("DELETE FROM stages")
    query(STAGE, run.id)
    query("UPDATE items SET due_at = ecluse_now() + %s::interval", due)
    found = await told(board, run)
    assert found.deadline_at is not None
    assert found.remark.startswith("stage work has until ")
    assert found.remark.endswith(": what starts later fails then") is late
