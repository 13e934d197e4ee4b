"""Reconciliations: what is due when, what a pass finds, what it leaves out, and the run that corrects it."""

from __future__ import annotations

from datetime import timedelta

import pytest

from ecluse.base.errors import Conflict
from ecluse.flows.pricing import runs
from ecluse.flows.pricing.reconciliations import correct_run, reconcile_run
from tests.support.pricing_rows import BY
from tests.support.pricing_world import TENANT

PRODUCT = "gid://shopify/Product/1"
DUE = """
SELECT kind, extract(epoch FROM due_at - (SELECT finished_at FROM rule_runs))::int FROM rule_reconciliations
ORDER BY due_at
"""


@pytest.fixture
async def applied(request, shop, connection):
    """A world with an applied run; its first pass is due at once only if a test asks for it."""
    world = await shop(soon=getattr(request, "param", timedelta(hours=1)))
    run = await world.previewed(connection, await world.project(connection))
    return world, await world.applied(connection, run)


async def passed(world, connection, run):
    """The report of a pass that is made now."""
    async with connection.transaction():
        started = await reconcile_run(connection, world.made.flow, TENANT, run["id"], BY)
    await world.over(connection, run, started)
    columns = "checked, mismatches, unverified, superseded, finished_at IS NOT NULL"
    return world.query(f"SELECT {columns} FROM rule_reconciliations WHERE run_id = %s", started)[0]  # noqa: S608 - our own names


async def change(world, variant, amount):
    async with world.client() as client:
        await client.set_prices(PRODUCT, {variant: amount}, key="other")


@pytest.mark.req("PRC-56")
@pytest.mark.parametrize("applied", [timedelta(0)], indirect=True)
async def test_passes_are_due_soon_after_an_hour_and_daily_for_30_days(applied, connection, query):
    world, run = applied
    rows = query(DUE)
    assert rows == [("immediate", 0), ("delayed", 3_600), *(("daily", n * 86_400) for n in range(1, 31))]
    await world.made.flow.watch(connection)
    [started] = [one for (one,) in query("SELECT run_id FROM rule_reconciliations WHERE run_id IS NOT NULL")]
    await world.over(connection, run, started)
    assert query("SELECT kind, checked, mismatches FROM rule_reconciliations WHERE finished_at IS NOT NULL") == [
        ("immediate", 10, 0)
    ]
    await world.made.flow.watch(connection)
    assert query("SELECT count(*) FROM rule_reconciliations WHERE run_id IS NOT NULL") == [(1,)]
    items = query("SELECT order_at > now() + interval '50 minutes' FROM items WHERE stage = 'reconcile'")
    assert items == [(True,)]
    await world.rolled_back(connection, run)
    assert query("SELECT count(*) FROM rule_reconciliations WHERE run_id IS NULL") == [(0,)]


@pytest.mark.parametrize("applied", [timedelta(0)], indirect=True)
async def test_the_passes_of_a_disabled_tenant_wait_until_it_is_enabled(applied, connection, query):
    world, _ = applied
    started = "SELECT count(*) FROM rule_reconciliations WHERE run_id IS NOT NULL"
    query("UPDATE tenants SET disabled_at = now() WHERE id = %s", TENANT)
    await world.made.flow.watch(connection)
    assert query(started) == [(0,)]
    query("UPDATE tenants SET disabled_at = NULL WHERE id = %s", TENANT)
    await world.made.flow.watch(connection)
    assert query(started) == [(1,)]


@pytest.mark.req("PRC-51", "PRC-52", "PRC-53", "PRC-54")
async def test_a_changed_price_is_reported_with_one_event_per_value(applied, connection, query):
    world, run = applied
    target, variant, after = world.targets(run, "id, variant_id, after_amount")[3]
    await change(world, variant, 4_242)
    assert await passed(world, connection, run) == (10, 1, 0, 0, True)
    assert await passed(world, connection, run) == (10, 1, 0, 0, True)
    difference = 4_242 - after
    rows = query("SELECT rule_target_id, expected, actual, difference FROM rule_mismatches")
    assert rows == [(target, after, 4_242, difference)] * 2
    sql = "SELECT event_key, payload FROM events_outbox WHERE event_type LIKE '%%.mismatch' ORDER BY id"
    [(key, payload)] = query(sql)
    expected = {"targetId": str(target), "runId": str(run["id"]), "expected": after, "actual": 4_242}
    assert (key, payload) == (f"{run['id']}:{target}:mismatch:4242", {**expected, "difference": difference})
    await change(world, variant, 4_343)
    await passed(world, connection, run)
    assert len(query(sql)) == 2
    assert len(world.writes()) == 10


async def test_prices_that_cannot_be_read_are_unverified(applied, connection):
    world, run = applied
    world.sandbox.set_faults([{"vendor": "shopify", "kind": "unauthorized"}])
    assert await passed(world, connection, run) == (0, 0, 10, 0, True)


async def test_targets_that_a_later_run_has_changed_are_left_out(applied, connection):
    world, run = applied
    later = await world.previewed(connection, run["project_id"])
    chosen = [one for (one,) in world.targets(later, "id")][:4]
    await world.applied(connection, later, chosen)
    assert await passed(world, connection, run) == (6, 0, 0, 4, True)


@pytest.mark.req("PRC-55")
async def test_a_correcting_run_restores_what_was_applied(applied, connection):
    world, run = applied
    with pytest.raises(Conflict, match="has found a price to correct"):
        await correct_run(connection, TENANT, run["id"], BY)
    variant, after = world.targets(run, "variant_id, after_amount")[0]
    await change(world, variant, 4_242)
    await passed(world, connection, run)
    async with connection.transaction():
        made = await correct_run(connection, TENANT, run["id"], BY)
    correcting = await runs.show_run(connection, TENANT, made)
    assert (correcting["status"], correcting["corrects_id"], correcting["counts"]) == (
        "PREVIEW",
        run["id"],
        {"PREVIEW": 1},
    )
    assert world.targets(correcting, "variant_id, before_amount, after_amount") == [(variant, 4_242, after)]
    assert (await world.applied(connection, correcting))["status"] == "APPLIED"
    assert (await world.prices(run))[0] == after


async def test_only_a_run_with_applied_prices_is_reconciled(shop, connection):
    world = await shop()
    run = await world.previewed(connection, await world.project(connection))
    with pytest.raises(Conflict, match="no applied prices"):
        await reconcile_run(connection, world.made.flow, TENANT, run["id"], BY)
