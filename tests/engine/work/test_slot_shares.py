"""Worker slots are shared: calls of one tenant that hang leave some to the others."""

from __future__ import annotations

import asyncio
import time

import pytest

from ecluse.engine import Done, Item, Lane, NewItem, Result, Start, WorkContext
from ecluse.engine.model.shares import share_left
from ecluse.insight.waiting import why_run
from tests.support.engine_flows import flow, keys, stage, until
from tests.support.runs import start_run


@pytest.mark.parametrize(
    ("held", "others", "left"),
    [
        (0, 0, 150),  # of 200, three quarters
        (150, 0, 0),
        (100, 0, 50),
        (0, 150, 37),  # three quarters of what another one leaves
        (37, 150, 0),
        (0, 199, 1),  # the last slot is for anyone
        (1, 199, 0),
        (150, 50, -38),  # held from when there were no others
    ],
)
def test_an_owner_may_take_its_share_of_what_the_others_leave(held, others, left, query):
    assert share_left(0.75, 200, held, others) == left
    assert query("SELECT share_left(0.75, 200, %s, %s)", held, others) == [(left,)]


@pytest.mark.parametrize(("share", "slots"), [(0.05, 1), (1.0, 1), (0.05, 200)])
def test_every_owner_may_take_a_slot(share, slots):
    assert share_left(share, slots, 0, slots - 1) == 1


class Vendor:
    """Hangs on the calls of one tenant, after so many that it answers."""

    def __init__(self, answered: int = 0) -> None:
        self.calls: dict[str, list[float]] = {"bad": [], "good": []}
        self.answered = answered

    async def __call__(self, _: WorkContext, item: Item) -> Result:
        calls = self.calls[item.tenant_id]
        calls.append(time.monotonic())
        if item.tenant_id == "bad" and len(calls) > self.answered:
            await asyncio.sleep(3600)
        return Done()


@pytest.mark.parametrize("answered", [0, 300], ids=["at once", "after calls that were answered"])
async def test_calls_of_a_tenant_that_hang_do_not_delay_another_tenant(start_kit, answered):
    vendor = Vendor(answered)
    kit = await start_kit(f := flow(stage(vendor)), hands=20, tenant_share=0.75)
    await start_run(kit, Start(f, "bad", input={"targets": keys(answered + 100)}, tenant_id="bad"))
    await until(lambda: len(vendor.calls["bad"]) == answered + 15)
    begun = time.monotonic()
    await start_run(kit, Start(f, "good", input={"targets": keys(10)}, tenant_id="good"))
    await until(lambda: len(vendor.calls["good"]) == 10, seconds=10)
    assert vendor.calls["good"][-1] - begun < 1
    assert len(vendor.calls["bad"]) == answered + 15


async def test_a_call_that_waits_for_a_slot_names_the_share_of_its_tenant(start_kit):
    vendor = Vendor()
    kit = await start_kit(f := flow(stage(vendor)), hands=20, tenant_share=0.75)
    bad = await start_run(kit, Start(f, "bad", input={"targets": keys(100)}, tenant_id="bad"))
    await until(lambda: len(vendor.calls["bad"]) == 15)
    async with kit.pool.connection() as connection:
        (waiting,) = (await why_run(connection, "bad", bad.run.id)).groups
    own = "15 calls of the tenant to this vendor are in flight"
    assert waiting.detail.startswith(f"{own}: its share of the 20 worker slots of 1 replica")
    assert waiting.first_at is None


async def test_a_tenant_whose_calls_to_one_vendor_hang_has_slots_for_another_vendor(start_kit):
    hanging, other = Vendor(), []

    async def answer(_: WorkContext, item: Item) -> Result:
        other.append(item.key)
        return Done()

    slow, quick = flow(stage(hanging)), flow(stage(answer, lane=Lane("elsewhere")), "other")
    kit = await start_kit(slow, quick, hands=20, tenant_share=0.75)
    await start_run(kit, Start(slow, "slow", input={"targets": keys(50)}, tenant_id="bad"))
    await until(lambda: len(hanging.calls["bad"]) == 15)
    await start_run(kit, Start(quick, "quick", input={"targets": keys(5)}, tenant_id="bad"))
    await until(lambda: len(other) == 5, seconds=10)
    assert len(hanging.calls["bad"]) == 15


async def test_the_lanes_of_a_tenant_beneath_one_base_have_one_share(start_kit, query):
    vendor = Vendor()
    one = stage(vendor)

    async def given(_, run):
        return [NewItem(key, lane=Lane(f"lane/{key}")) for key in run.input["targets"]]

    async def story(run) -> None:
        await run.select(given)
        await run.fan_out(one, given)
        await run.gate(one)

    kit = await start_kit(f := flow(one, story=story), hands=20, tenant_share=0.75)
    await start_run(kit, Start(f, "bad", input={"targets": keys(50)}, tenant_id="bad"))
    await until(lambda: len(vendor.calls["bad"]) == 15)
    await start_run(kit, Start(f, "good", input={"targets": keys(3)}, tenant_id="good"))
    await until(lambda: len(vendor.calls["good"]) == 3, seconds=10)
    assert len(vendor.calls["bad"]) == 15
    # The others are left to replicas with free slots.
    claimed = "SELECT count(*) FROM items WHERE tenant_id = 'bad' AND claim_id IS NOT NULL"
    await until(lambda: query(claimed) == [(15,)])
