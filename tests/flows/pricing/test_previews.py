"""Previews: the catalogue is read, page by page, and becomes a plan; nothing is written outside."""

from __future__ import annotations

import pytest

from ecluse.base.errors import Conflict
from ecluse.engine import Start
from ecluse.flows.pricing import runs
from tests.support.pricing_world import PATIENCE, TEN_PERCENT_OFF, TENANT
from tests.support.runs import start_run, wait_for_run

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


async def test_a_preview_goes_on_after_errors_with_the_page_that_is_missing(shop, connection, query, sandbox):
    """Four errors in a row are as many as an item has executions; the first came after progress, and counts none."""
    world = await shop()
    sandbox.set_faults([{"vendor": "shopify", "kind": "server_error", "after": 1, "times": 4}])
    terms = {**FIRST_50, "selection": {"tags": ["first-50", "season-1"]}}
    run = await world.previewed(connection, await world.project(connection), terms)
    assert run["totals"]["selected"] == 500 + 1_000 - 50  # five products have both tags
    assert len(sandbox.ledger(kind="call")) == 2 + 4 + 4  # the pages of both tags, each read once, and the errors
    assert query("SELECT count(*) FROM rule_pages") == [(0,)]


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
    again = f"preview the rule again with `ecluse pricing runs preview {run['rule_id']}`"
    assert run["status"] == "PREVIEW"
    assert run["stopped_reason"] == f"the preview failed ({execution['error']}): {again}"
    with pytest.raises(Conflict, match=f"has no plan: the preview failed .*{again}"):
        await world.queued(connection, run)


@pytest.mark.req("PRC-03")
async def test_a_schedule_previews_queues_and_applies_a_rule(shop, connection, query):
    world = await shop()
    rule = await world.rule(connection, await world.project(connection))
    given = {"rule_id": str(rule), "canary": 2}
    started = await start_run(world.kit, Start(world.made.flow, "schedule:7:1", input=given, schedule_id=None))
    ended = await wait_for_run(world.kit, started.run.id, PATIENCE)
    assert ended["status"] == "completed", ended
    [(run, execution)] = query("SELECT rule_run_id, run_id FROM rule_executions WHERE kind = 'apply'")
    await wait_for_run(world.kit, execution, PATIENCE)
    done = await runs.show_run(connection, TENANT, run)
    assert (done["status"], done["canary"], done["actor"], done["source"]) == ("APPLIED", 2, "Scheduler", "schedule")
    moves = query("SELECT to_status, actor FROM rule_history WHERE rule_target_id IS NULL ORDER BY id")
    assert moves[1] == ("QUEUED", "Scheduler")
    assert set(world.writes().values()) == {1}
