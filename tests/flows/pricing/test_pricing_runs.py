"""Rule runs: created from a plan, queued as previewed, retried by hand; the dead letters of a project."""

from __future__ import annotations

import time

import pytest

from ecluse.base.errors import Conflict, ForbiddenTransition, InvalidInput, NotFound
from ecluse.db.query import fetch_all, fetch_column, fetch_row, fetch_rows, fetch_value
from ecluse.flows.pricing.rules import Terms, make_plan
from ecluse.flows.pricing.runs import NewRun, create_rule_run, drain_dlq, queue_for_processing, retry_failed
from ecluse.flows.pricing.states import Move, move_runs, move_targets
from tests.support.pricing_rows import BY, RULE, TARGETS, WORKER, connected, ended, new_project, new_run, plan_of

STATUSES = "SELECT status, count(*) FROM rule_targets WHERE rule_run_id = %s GROUP BY 1 ORDER BY 1"


@pytest.mark.req("PRC-02", "PRC-31", "PRC-32", "PRC-78")
async def test_a_run_is_created_from_a_plan_as_a_preview(dsn):
    async with connected(dsn) as connection:
        project = await new_project(connection)
        run = await new_run(connection, project, count=3)
        (row,) = await fetch_all(connection, dict, "SELECT * FROM rule_runs")
        assert (row["status"], row["project_id"], row["plan_hash"]) == ("PREVIEW", project, plan_of(3).hash)
        assert (row["actor"], row["correlation_id"], row["source"]) == ("key 7", "request-1", "api")
        assert row["queued_at"] is None
        assert row["totals"]["excluded"] == {"UNCHANGED": 1}
        target = await fetch_row(
            connection, "SELECT variant_id, before_amount, after_amount, status, attempts FROM rule_targets ORDER BY id"
        )
        assert target == ("v0", 1_000, 900, "PREVIEW", 0)
        excluded = await fetch_rows(connection, "SELECT rule_run_id, variant_id, amount, reason FROM rule_exclusions")
        assert excluded == [(run, "free", 0, "UNCHANGED")]


@pytest.mark.req("PRC-13", "PRC-73", "G-14")
async def test_a_run_is_created_queued_by_way_of_the_preview_and_in_no_other_state(dsn):
    async with connected(dsn) as connection:
        project = await new_project(connection)
        run = await new_run(connection, project, count=2, status="QUEUED")
        assert await fetch_rows(connection, STATUSES, (run,)) == [("QUEUED", 2)]
        of_run = "SELECT from_status, to_status FROM rule_history WHERE rule_target_id IS NULL ORDER BY id"
        assert await fetch_rows(connection, of_run) == [(None, "PREVIEW"), ("PREVIEW", "QUEUED")]
        with pytest.raises(InvalidInput, match="PREVIEW or QUEUED, not as APPLYING"):
            await new_run(connection, project, status="APPLYING")
        nothing = make_plan(Terms.model_validate(RULE), "EUR", [])
        with pytest.raises(InvalidInput, match="changes no price"):
            await create_rule_run(connection, NewRun("default", project, "EUR", None, RULE, nothing), BY)
        assert await fetch_value(connection, "SELECT count(*) FROM rule_runs") == 1


@pytest.mark.req("PRC-03", "PRC-17", "PRC-78")
async def test_what_is_queued_is_exactly_the_plan_that_was_seen(dsn):
    async with connected(dsn) as connection:
        project = await new_project(connection)
        run, plan = await new_run(connection, project), plan_of(4)
        with pytest.raises(Conflict, match="read its preview again"):
            await queue_for_processing(connection, "default", run, "another", None, BY)
        with pytest.raises(NotFound):
            await queue_for_processing(connection, "acme", run, plan.hash, None, BY)
        with pytest.raises(InvalidInput):
            await queue_for_processing(connection, "default", run, plan.hash, [], BY)
        assert await fetch_rows(connection, STATUSES, (run,)) == [("PREVIEW", 4)]
        chosen = (await fetch_column(connection, TARGETS, (run,)))[:3]
        await queue_for_processing(connection, "default", run, plan.hash, chosen, BY)
        assert await fetch_rows(connection, STATUSES, (run,)) == [("PREVIEW", 1), ("QUEUED", 3)]
        with pytest.raises(ForbiddenTransition, match="from QUEUED to QUEUED"):
            await queue_for_processing(connection, "default", run, plan.hash, None, BY)


@pytest.mark.req("PRC-15", "PRC-22", "PRC-48", "PRC-49", "PRC-50", "G-12", "G-18")
async def test_failed_targets_are_retried_all_or_chosen_and_nothing_else_is(dsn):
    async with connected(dsn) as connection:
        project = await new_project(connection)
        run = await new_run(connection, project, status="QUEUED")
        first, second = await ended(connection, run, 2)
        applied = (await fetch_column(connection, TARGETS, (run,)))[3]
        other = await new_run(connection, project, status="QUEUED")
        (foreign,) = await ended(connection, other, 1)
        before = await fetch_value(connection, "SELECT count(*) FROM rule_history")
        for wrong, error in ((applied, ForbiddenTransition), (foreign, NotFound), (10**9, NotFound)):
            with pytest.raises(error):
                async with connection.transaction():
                    await retry_failed(connection, "default", run, [first, wrong], BY)
        with pytest.raises(NotFound):
            await retry_failed(connection, "acme", run, None, BY)
        assert await fetch_value(connection, "SELECT count(*) FROM rule_history") == before

        await retry_failed(connection, "default", run, [second], BY)
        assert await fetch_rows(connection, STATUSES, (run,)) == [("APPLIED", 2), ("FAILED", 1), ("QUEUED", 1)]
        assert await fetch_row(connection, "SELECT status, round FROM rule_runs WHERE id = %s", (run,)) == (
            "APPLYING",
            1,
        )
        assert await fetch_row(connection, "SELECT attempts, round FROM rule_targets WHERE id = %s", (second,)) == (
            0,
            1,
        )
        await move_targets(connection, [Move(second, ("APPLYING", "APPLIED"))], WORKER)
        await move_runs(connection, {run: "PARTIAL"}, WORKER)
        await retry_failed(connection, "default", run, None, BY)
        queued = "SELECT id FROM rule_targets WHERE rule_run_id = %s AND status = 'QUEUED'"
        assert await fetch_column(connection, queued, (run,)) == [first]


@pytest.mark.req("PRC-46", "PRC-47", "PRC-78", "G-16")
async def test_the_dead_letters_of_a_project_are_its_failed_targets_and_the_report_changes_nothing(dsn):
    async with connected(dsn) as connection:
        project, other = await new_project(connection), await new_project(connection, name="Other")
        run = await new_run(connection, project, status="QUEUED")
        await ended(connection, run, 3)
        unsent = await new_run(connection, project, status="QUEUED")
        await ended(connection, unsent, 4, "NOT_ATTEMPTED")
        await ended(connection, await new_run(connection, other, status="QUEUED"), 1)
        before = await fetch_rows(connection, "SELECT id, status FROM rule_targets ORDER BY id")
        report = await drain_dlq(connection, "default", project)
        assert (report["total"], report["not_attempted"]) == (7, 4)
        assert [(one["run_id"], one["error_code"], one["targets"]) for one in report["causes"]] == [
            (str(unsent), "NOT_ATTEMPTED", 4),
            (str(run), "VENDOR_REFUSED", 3),
        ]
        assert (await drain_dlq(connection, "acme", project))["total"] == 0
        assert await fetch_rows(connection, "SELECT id, status FROM rule_targets ORDER BY id") == before


async def test_thousands_of_targets_are_stored_and_queued_set_based(dsn):
    async with connected(dsn) as connection:
        began = time.monotonic()
        run = await new_run(connection, await new_project(connection), count=3_000, status="QUEUED")
        assert await fetch_rows(connection, STATUSES, (run,)) == [("QUEUED", 3_000)]
        assert time.monotonic() - began < 20  # a statement per target takes longer
