"""The pace of a lane follows its vendor's own budget over all replicas; and may be lowered for a while."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from ecluse.base.errors import Conflict, NotFound, TransientError
from ecluse.engine import Done, Item, Lane, Result, RetryPolicy, Throttle, WorkContext, restore_lane, slow_lane
from ecluse.engine.lanes.rates import restore_quiet_lanes
from tests.support.engine_flows import flow, keys, open_board, run_to_end, stage

COST, REFILL, SIZE = 10.0, 200.0, 100.0
PATIENT = RetryPolicy(executions=50, base=0.05)


class Bucket:
    """A vendor that sells calls for points, and says in each answer how many are left."""

    def __init__(self) -> None:
        self.points, self.at = SIZE, time.monotonic()
        self.began: list[float] = []
        self.throttled: list[float] = []

    async def work(self, context: WorkContext, item: Item) -> Result:
        now = time.monotonic()
        self.points, self.at = min(SIZE, self.points + REFILL * (now - self.at)), now
        if self.points < COST:
            self.throttled.append(now)
            context.heard(item, Throttle(self.points, REFILL, COST))
            raise TransientError("throttled", code="THROTTLED", ambiguous=False)
        self.points -= COST
        self.began.append(now)
        context.heard(item, Throttle(self.points, REFILL, COST))
        return Done()


@pytest.mark.req("ENG-51")
async def test_calls_follow_the_vendors_budget_over_all_replicas(start_kit, one):
    """The lane has no rate of its own: after the first answers it has that of the vendor, on each replica."""
    vendor = Bucket()
    f = flow(stage(vendor.work, lane=Lane("points"), retry=PATIENT))
    kits = [await start_kit(f) for _ in range(3)]
    await run_to_end(kits[0], f, keys(90))
    steady = [at for at in vendor.began if at > vendor.began[0] + 1]
    assert [at for at in vendor.throttled if at > steady[0]] == []
    pace = (len(steady) - 1) / (steady[-1] - steady[0])
    assert pace >= 0.8 * REFILL / COST  # other tests run beside it
    assert one("SELECT vendor_per_second, per_second FROM lanes WHERE name = 'points'") == (20.0, 20.0)


@pytest.fixture
async def board(dsn):
    async with open_board(dsn) as board:
        yield board


RATE = "UPDATE lanes SET declared_per_second = per_second, vendor_per_second = 6"
IN_FORCE = "SELECT per_second, slowed_to, slowed_reason, slowed_until > ecluse_now() FROM lanes"


async def test_a_lane_is_slowed_until_it_has_been_quiet_for_long_enough(board, query, one):
    await board.lane(per_second=10)
    async with board.pool.connection() as connection:
        await connection.execute(RATE)
        await slow_lane(connection, "lane", reason="many 429s", quiet=timedelta(minutes=5))
        assert one(IN_FORCE) == (3.0, 0.5, "many 429s", True), "half of what the vendor allows"
        await connection.execute("UPDATE lanes SET slowed_until = slowed_until - interval '4 minutes'")
        await restore_quiet_lanes(board.pool)
        assert one(IN_FORCE)[0] == 3.0, "not quiet for long enough"
        await slow_lane(connection, "lane", reason="many 429s", quiet=timedelta(minutes=5))
        assert one("SELECT slowed_until > ecluse_now() + interval '4 minutes' FROM lanes"), "said again: from now on"
        await connection.execute("UPDATE lanes SET slowed_until = ecluse_now()")
        await restore_quiet_lanes(board.pool)
        assert one(IN_FORCE) == (6.0, None, None, None)


async def test_a_slowed_lane_is_restored_at_once_on_request(board, one):
    await board.lane(per_second=10)
    async with board.pool.connection() as connection:
        await connection.execute(RATE)
        await slow_lane(connection, "lane", reason="many 429s", to=0.1)
        assert one(IN_FORCE)[0] == pytest.approx(0.6)
        assert await restore_lane(connection, "lane")
        assert one(IN_FORCE)[0] == 6.0
        assert not await restore_lane(connection, "lane")


async def test_only_a_lane_with_a_rate_can_be_slowed(board):
    await board.lane()
    async with board.pool.connection() as connection:
        with pytest.raises(Conflict, match="no rate"):
            await slow_lane(connection, "lane", reason="many 429s")
        with pytest.raises(NotFound):
            await slow_lane(connection, "nowhere", reason="many 429s")
