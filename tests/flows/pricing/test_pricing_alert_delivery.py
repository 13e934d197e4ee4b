"""From a shop that refuses calls to the messages about it: Slack is told of the burst, PagerDuty of the failures, and
both of the end."""

from __future__ import annotations

import pytest

from ecluse.engine.cluster.alerts import evaluate_measures
from ecluse.flows.pricing import metrics
from ecluse.notify.dispatch import dispatch
from ecluse.notify.flow import working
from tests.support.engine_flows import until
from tests.support.notify_world import World as Notified
from tests.support.notify_world import setup_of
from tests.support.pricing_world import World, pricing
from tests.support.vendor_clients import SECRETS

PRODUCT = "gid://shopify/Product/1"
REFUSED = {"vendor": "shopify", "kind": "throttle", "ids": [PRODUCT], "retry_after": None, "times": 4}
KEY = "0123456789abcdef0123456789abcdef"


@pytest.mark.req("PRC-66", "PRC-67", "PRC-68", "PRC-71", "G-17")
async def test_a_shop_that_refuses_slows_its_lane_and_alerts_slack_and_pagerduty(dsn, query, start_kit, sandbox):
    made = pricing()
    told = working(setup_of(dsn, SECRETS))
    kit = await start_kit(made.flow, told, sinks=[lambda events: dispatch(kit.pool, events)])
    shop, notified = World(kit, made, sandbox, query), Notified(kit, query, SECRETS)
    await notified.endpoint(f"{sandbox.url}/slack/services/T0/B0/x", "pricing.alert.warning.*", kind="slack")
    incidents = f"{sandbox.url}/pagerduty/v2/enqueue"
    await notified.endpoint(incidents, "pricing.alert.critical.*", kind="pagerduty", secret=KEY)
    pace = "SELECT per_second, slowed_to FROM lanes WHERE name LIKE 'shop/%%'"

    async with kit.pool.connection() as connection:
        run = await shop.previewed(connection, await shop.project(connection))
        sandbox.set_faults([REFUSED])
        assert (await shop.applied(connection, run))["status"] == "FAILED"
        await evaluate_measures(connection, made.flow)
        assert query(pace) == [(5_000, 0.5)]
        await notified.settled(2)
        assert (await metrics.read(connection))[0]["throttled"] == 4
        assert (await shop.retried(connection, run))["status"] == "APPLIED"
        query("UPDATE clock_offset SET \"offset\" = interval '6 minutes'")
        await evaluate_measures(connection, made.flow)
        await notified.settled(4)

    slack = [one["value"].splitlines()[0] for one in sandbox.ledger("slack", "effect")]
    assert [line.split("*")[1] for line in slack] == ["pricing.alert.warning.raised", "pricing.alert.warning.cleared"]
    assert all("4 calls refused with 429 in 5 minutes" in line for line in slack)
    assert [one["value"] for one in sandbox.ledger("pagerduty", "effect")] == ["critical", "resolved"]
    await until(lambda: query("SELECT count(*) FROM pricing_alerts WHERE cleared_at IS NULL") == [(0,)])
