"""Previews: the catalogue is read, page by page, and becomes a plan; nothing is written outside."""

from __future__ import annotations

import pytest

from ecluse.base.errors import Conflict
from tests.support.pricing_world import TEN_PERCENT_OFF

FIRST_50 = {"selection": {"tags": ["first-50"]}, "change": {"kind": "percent", "percent": "-10"}, "ending": "99"}


@pytest.mark.req("PRC-02")
async def test_a_preview_reads_the_catalogue_and_changes_nothing(shop, connection, query, sandbox):
    world = await shop()
    run = await world.previewed(connection, await world.project(connection), FIRST_50)
    assert (run["status"], len(run["plan_hash"])) == ("PREVIEW", 64)
    totals = run["totals"]
    assert totals["selected"] == 500 == totals["changed"] + sum(totals["excluded"].values())
    assert run["counts"] == {"PREVIEW": totals["changed"]}
    assert all(
        after % 100 == 99 and after != before for before, after in world.targets(run, "before_amount, after_amount")
    )
    assert query("SELECT DISTINCT reason FROM rule_exclusions") == [(one,) for one in sorted(totals["excluded"])]
    assert sandbox.ledger(kind="effect") == []
    assert len(sandbox.ledger(kind="call")) == 2  # pages of 250
    [execution] = run["executions"]
    assert (execution["kind"], execution["status"]) == ("preview", "completed")
    assert query("SELECT name FROM lanes WHERE base = 'shop' AND name <> base") == [
        (f"shop/default/project-{run['project_id']}",)
    ]


async def test_a_rule_that_changes_nothing_has_a_plan_that_cannot_be_queued(shop, connection):
    world = await shop()
    terms = {**TEN_PERCENT_OFF, "selection": {"tags": ["no-such-tag"]}}
    run = await world.previewed(connection, await world.project(connection), terms)
    assert run["totals"]["selected"] == 0
    with pytest.raises(Conflict, match="changes no price"):
        await world.queued(connection, run)


async def test_a_shop_that_refuses_the_token_fails_the_preview(shop, connection, sandbox):
    world = await shop()
    sandbox.set_faults([{"vendor": "shopify", "kind": "unauthorized"}])
    run = await world.previewed(connection, await world.project(connection))
    [execution] = run["executions"]
    assert (run["plan_hash"], execution["status"]) == (None, "failed")
    assert "access token" in execution["error"]
    with pytest.raises(Conflict, match="has no plan"):
        await world.queued(connection, run)
