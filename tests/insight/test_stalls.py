"""Which of the runs in a list stand still."""

from __future__ import annotations

from datetime import timedelta

import pytest

from ecluse.engine import Waiter, put_waiters
from ecluse.insight import run_queries
from ecluse.insight.stalls import Stall, stalls
from ecluse.insight.waiting import why_run
from ecluse.web import run_state
from tests.support.engine_flows import open_board


@pytest.fixture
async def board(dsn):
    async with open_board(dsn) as board:
        yield board


async def found(board, *runs, tenant="default"):
    async with board.pool.connection() as connection:
        return await stalls(connection, tenant, [run.id for run in runs])


async def test_a_run_that_waits_in_a_closed_lane_is_marked_and_so_are_those_that_wait_for_it(board, query):
    await board.lane()
    await board.lane("other")
    above, below, aside = await board.run(), await board.run(["a"]), await board.run(["b"], lane="other")
    async with board.pool.connection() as connection:
        await put_waiters(connection, [Waiter(below.id, above.id)])
    assert await found(board, above, below, aside) == {}
    query("UPDATE lanes SET paused_at = now(), paused_by = 'ann', paused_reason = 'invoice' WHERE name = 'lane'")
    paused = Stall(None, "lane", "invoice", None)
    assert await found(board, above, below, aside) == {above.id: paused, below.id: paused}
    assert await found(board, aside) == {}
    assert await found(board, below, tenant="rival") == {}
    query("UPDATE lanes SET held_until = ecluse_now() + interval '1 hour', held_reason = '429' WHERE name = 'other'")
    (held,) = (await found(board, aside)).values()
    assert [(held.held_until,)] == query("SELECT held_until FROM lanes WHERE name = 'other'")


async def test_a_run_whose_gate_has_seen_nothing_done_for_a_while_is_marked(board, query):
    await board.lane()
    run = await board.run(["a"])
    assert await found(board, run) == {}
    query('UPDATE clock_offset SET "offset" = %s', timedelta(minutes=3))
    (stall,) = (await found(board, run)).values()
    assert [(stall.quiet_since,)] == query("SELECT progress_at FROM stages")
    query("UPDATE stages SET progress_at = ecluse_now()")
    assert await found(board, run) == {}
    query("UPDATE runs SET orchestrated = false")
    query("UPDATE stages SET progress_at = '2026-03-02'")
    assert await found(board, run) == {}, "a queue that moves is no standstill"


async def test_a_list_says_of_a_run_what_its_page_says(board, query):
    lane = await board.lane()
    run = await board.run(["a", "b"])
    (taken,) = await board.claim(lane, room=1)
    await board.finish([taken])
    ((done_at,),) = query("SELECT done_at FROM claims")
    for minutes, quiet in ((1, False), (3, True)):
        query('UPDATE clock_offset SET "offset" = %s', timedelta(minutes=minutes))
        listed = (await found(board, run)).get(run.id)
        async with board.pool.connection() as connection:
            row = await run_queries.show_run(connection, "default", run.id)
            waits = await why_run(connection, "default", run.id)
            ((now,),) = query("SELECT ecluse_now()")
            shown = await run_state.of(connection, row, now, waits)
        assert waits.progress_at == done_at
        assert (listed.quiet_since if listed else None) == shown.quiet_since == (done_at if quiet else None)


async def test_none_are_asked_about(board):
    assert await found(board) == {}
