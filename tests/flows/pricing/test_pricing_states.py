"""The states of rule runs and targets: every pair, what the database itself refuses, and the history."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import product

import psycopg
import pytest

from ecluse.base.errors import Conflict, ForbiddenTransition, NotFound
from ecluse.db.query import fetch_all, fetch_column, fetch_row, fetch_value
from ecluse.flows.pricing.states import (
    RUNS,
    TARGETS,
    Move,
    contradiction,
    move_runs,
    move_targets,
    status_by_counts,
    validate_run_state,
)
from tests.support.pricing_rows import BY, WORKER, connected, new_project, new_run

RUN_PAIRS = {
    ("PREVIEW", "QUEUED"),
    ("QUEUED", "APPLYING"),
    ("APPLYING", "APPLIED"),
    ("APPLYING", "PARTIAL"),
    ("APPLYING", "FAILED"),
    ("PARTIAL", "APPLYING"),
    ("FAILED", "APPLYING"),
    ("APPLIED", "ROLLED_BACK"),
    ("PARTIAL", "ROLLED_BACK"),
}
TARGET_PAIRS = {
    ("PREVIEW", "QUEUED"),
    ("QUEUED", "APPLYING"),
    ("APPLYING", "APPLIED"),
    ("APPLYING", "QUEUED"),
    ("APPLYING", "FAILED"),
    ("FAILED", "QUEUED"),
    ("APPLIED", "ROLLED_BACK"),
}
# The shortest ways from PREVIEW to each state.
RUN_WAYS: dict[str, Sequence[str]] = {
    "PREVIEW": (),
    "QUEUED": ("QUEUED",),
    "APPLYING": ("QUEUED", "APPLYING"),
    "APPLIED": ("QUEUED", "APPLYING", "APPLIED"),
    "PARTIAL": ("QUEUED", "APPLYING", "PARTIAL"),
    "FAILED": ("QUEUED", "APPLYING", "FAILED"),
    "ROLLED_BACK": ("QUEUED", "APPLYING", "APPLIED", "ROLLED_BACK"),
}
TARGET_WAYS = {state: way for state, way in RUN_WAYS.items() if state != "PARTIAL"}
TARGET_ROWS = "SELECT id FROM rule_targets WHERE rule_run_id = %s ORDER BY id"


def failing(target: int, path: Sequence[str]) -> Move:
    return Move(target, path, error_code="VENDOR_REFUSED" if path and path[-1] == "FAILED" else None)


@pytest.mark.req(
    "PRC-01", "PRC-03", "PRC-04", "PRC-05", "PRC-06", "PRC-07", "PRC-08", "PRC-09", "PRC-10", "PRC-11", "PRC-12",
    "PRC-13", "PRC-14", "ENG-98",
)  # fmt: skip
async def test_of_the_49_pairs_of_a_run_nine_are_moves_and_the_others_change_nothing(dsn):
    async with connected(dsn) as connection:
        project = await new_project(connection)
        for before, after in product(RUNS.meaning, repeat=2):
            run = await new_run(connection, project, count=1)
            for status in RUN_WAYS[before]:
                await move_runs(connection, {run: status}, WORKER)
            told = await fetch_value(connection, "SELECT count(*) FROM rule_history")
            if (before, after) in RUN_PAIRS:
                await move_runs(connection, {run: after}, BY)
                assert await fetch_value(connection, "SELECT status FROM rule_runs WHERE id = %s", (run,)) == after
                continue
            with pytest.raises(ForbiddenTransition, match=f"rule run {run} cannot go from {before} to {after}"):
                await move_runs(connection, {run: after}, BY)
            assert await fetch_value(connection, "SELECT status FROM rule_runs WHERE id = %s", (run,)) == before
            assert await fetch_value(connection, "SELECT count(*) FROM rule_history") == told


@pytest.mark.req("PRC-16", "PRC-17", "PRC-18", "PRC-19", "PRC-20", "PRC-21", "PRC-22", "PRC-23", "PRC-24", "ENG-98")
async def test_of_the_36_pairs_of_a_target_seven_are_moves_and_the_others_change_nothing(dsn):
    pairs = list(product(TARGETS.meaning, repeat=2))
    assert len(pairs) == 36
    async with connected(dsn) as connection:
        run = await new_run(connection, await new_project(connection), count=len(pairs))
        targets = await fetch_column(connection, TARGET_ROWS, (run,))
        ways = [(target, TARGET_WAYS[before]) for target, (before, _) in zip(targets, pairs, strict=True)]
        await move_targets(connection, [failing(target, way) for target, way in ways if way], WORKER)
        for target, (before, after) in zip(targets, pairs, strict=True):
            told = await fetch_value(connection, "SELECT count(*) FROM rule_history")
            if (before, after) in TARGET_PAIRS:
                await move_targets(connection, [failing(target, (after,))], BY)
                assert (
                    await fetch_value(connection, "SELECT status FROM rule_targets WHERE id = %s", (target,)) == after
                )
                continue
            with pytest.raises(ForbiddenTransition, match=f"target {target} cannot go from {before} to {after}"):
                await move_targets(connection, [failing(target, (after,))], BY)
            assert await fetch_value(connection, "SELECT status FROM rule_targets WHERE id = %s", (target,)) == before
            assert await fetch_value(connection, "SELECT count(*) FROM rule_history") == told


@pytest.mark.req("PRC-50", "PRC-76")
async def test_one_target_that_may_not_move_keeps_all_others_where_they_are(dsn):
    async with connected(dsn) as connection:
        project = await new_project(connection)
        run, other = await new_run(connection, project), await new_run(connection, project)
        first, second, *_ = await fetch_column(connection, TARGET_ROWS, (run,))
        stranger = (await fetch_column(connection, TARGET_ROWS, (other,)))[0]
        moves = [Move(first, ("QUEUED",)), Move(second, ("APPLIED",))]
        with pytest.raises(ForbiddenTransition):
            await move_targets(connection, moves, BY)
        with pytest.raises(NotFound, match=f"no target {stranger} of rule run {run}"):
            await move_targets(connection, [moves[0], Move(stranger, ("QUEUED",))], BY, run=run)
        with pytest.raises(NotFound, match="no rule run 999"):
            await move_runs(connection, {run: "QUEUED", 999: "QUEUED"}, BY)
        statuses = await fetch_column(connection, "SELECT DISTINCT status FROM rule_targets")
        assert statuses == ["PREVIEW"]


async def test_of_two_that_move_a_run_at_once_one_is_refused(dsn):
    async with connected(dsn) as one, connected(dsn) as other:
        run = await new_run(one, await new_project(one))

        async def queue(connection):
            async with connection.transaction():
                await move_runs(connection, {run: "QUEUED"}, BY)

        found = await asyncio.gather(queue(one), queue(other), return_exceptions=True)
        assert sorted(map(type, found), key=str) == sorted([type(None), ForbiddenTransition], key=str)
        assert await fetch_value(one, "SELECT count(*) FROM rule_history WHERE to_status = 'QUEUED'") == 1


@pytest.mark.req("PRC-31", "PRC-74", "PRC-76")
async def test_the_history_says_who_when_from_where_to_where_and_in_which_round(dsn):
    async with connected(dsn) as connection:
        run = await new_run(connection, await new_project(connection), count=1)
        (target,) = await fetch_column(connection, TARGET_ROWS, (run,))
        await move_runs(connection, {run: "QUEUED"}, BY)
        await move_targets(connection, [Move(target, ("QUEUED",))], BY)
        await move_runs(connection, {run: "APPLYING"}, WORKER)
        await move_targets(connection, [failing(target, ("APPLYING", "FAILED"))], WORKER)
        await move_runs(connection, {run: "FAILED"}, WORKER)
        await move_runs(connection, {run: "APPLYING"}, BY)
        await move_targets(connection, [Move(target, ("QUEUED",))], BY)
        history = await fetch_all(connection, dict, "SELECT * FROM rule_history ORDER BY id")
        ours, theirs = ("key 7", "api", "request-1"), ("worker", "engine", "request-1")
        assert [
            (
                row["rule_target_id"] == target,
                row["from_status"],
                row["to_status"],
                row["round"],
                (row["actor"], row["source"], row["correlation_id"]),
            )
            for row in history
        ] == [
            (False, None, "PREVIEW", 0, ours),
            (True, None, "PREVIEW", 0, ours),
            (False, "PREVIEW", "QUEUED", 0, ours),
            (True, "PREVIEW", "QUEUED", 0, ours),
            (False, "QUEUED", "APPLYING", 0, theirs),
            (True, "QUEUED", "APPLYING", 0, theirs),
            (True, "APPLYING", "FAILED", 0, theirs),
            (False, "APPLYING", "FAILED", 0, theirs),
            (False, "FAILED", "APPLYING", 1, ours),
            (True, "FAILED", "QUEUED", 1, ours),
        ]
        assert all(row["at"] is not None and row["tenant_id"] == "default" for row in history)


@pytest.mark.req("PRC-20", "PRC-25", "PRC-32")
async def test_instants_attempts_and_errors_follow_the_moves(dsn):
    async with connected(dsn) as connection:
        run = await new_run(connection, await new_project(connection), count=1)
        (target,) = await fetch_column(connection, TARGET_ROWS, (run,))
        await move_runs(connection, {run: "QUEUED"}, BY)
        await move_runs(connection, {run: "APPLYING"}, WORKER)
        await move_targets(connection, [Move(target, ("QUEUED",))], BY)
        columns = "SELECT status, attempts, round, error_code, error, applied_at IS NOT NULL FROM rule_targets"
        for attempts in (1, 2, 3):
            retry = Move(target, ("APPLYING", "QUEUED"), "VENDOR_ERROR_503", "unavailable", None, attempts)
            await move_targets(connection, [retry], WORKER)
            expected = ("QUEUED", attempts, 0, "VENDOR_ERROR_503", "unavailable", False)
            assert await fetch_row(connection, columns) == expected
        await move_targets(connection, [Move(target, ("APPLYING", "FAILED"), "TIMEOUT", "late")], WORKER)
        assert await fetch_row(connection, columns) == ("FAILED", 3, 0, "TIMEOUT", "late", False)
        await move_runs(connection, {run: "FAILED"}, WORKER)
        ends = "SELECT started_at, finished_at FROM rule_runs"
        started, finished = await fetch_row(connection, ends)
        assert started <= finished
        await move_runs(connection, {run: "APPLYING"}, BY)
        assert await fetch_row(connection, ends) == (started, None)
        await move_targets(connection, [Move(target, ("QUEUED",))], BY)
        assert await fetch_row(connection, columns) == ("QUEUED", 0, 1, None, None, False)
        await move_targets(connection, [Move(target, ("APPLYING", "APPLIED"))], WORKER)
        assert await fetch_row(connection, columns) == ("APPLIED", 0, 1, None, None, True)


BAD_RUNS = [
    "UPDATE rule_runs SET started_at = queued_at - interval '1 s' WHERE status = 'APPLIED'",
    "UPDATE rule_runs SET finished_at = started_at - interval '1 s' WHERE status = 'APPLIED'",
    "UPDATE rule_runs SET finished_at = NULL WHERE status = 'APPLIED'",
    "UPDATE rule_runs SET status = 'DONE'",
    "UPDATE rule_targets SET attempts = -1",
    "UPDATE rule_targets SET attempts = 4",
    "UPDATE rule_targets SET applied_at = NULL",
    "UPDATE rule_targets SET status = 'FAILED', applied_at = NULL",
    "UPDATE rule_targets SET status = 'FAILED', applied_at = NULL, error_code = 'X'",
    "UPDATE rule_targets SET status = 'QUEUED', applied_at = NULL",
    "UPDATE rule_targets SET after_amount = -1",
]


@pytest.mark.req("PRC-25", "PRC-26", "PRC-27", "PRC-28", "PRC-29", "PRC-30")
async def test_the_database_refuses_what_contradicts_the_invariants(dsn):
    async with connected(dsn) as connection:
        project = await new_project(connection)
        run = await new_run(connection, project, count=1)
        for status in RUN_WAYS["APPLYING"]:
            await move_runs(connection, {run: status}, WORKER)
        (target,) = await fetch_column(connection, TARGET_ROWS, (run,))
        await move_targets(connection, [Move(target, TARGET_WAYS["APPLIED"])], WORKER)
        await move_runs(connection, {run: "APPLIED"}, WORKER)
        for statement in BAD_RUNS:
            with pytest.raises(psycopg.errors.CheckViolation):
                await connection.execute(statement)
        for status in ("QUEUED", "APPLYING", "FAILED"):
            other = await new_run(connection, project, count=1)
            for one in RUN_WAYS["APPLYING"]:
                await move_runs(connection, {other: one}, WORKER)
            (target,) = await fetch_column(connection, TARGET_ROWS, (other,))
            await move_targets(connection, [failing(target, TARGET_WAYS[status])], WORKER)
            with pytest.raises(psycopg.errors.CheckViolation, match="Run marked APPLIED but has failed targets"):
                await move_runs(connection, {other: "APPLIED"}, WORKER)


@pytest.mark.req("PRC-26", "G-15")
async def test_a_target_rolled_back_by_choice_counts_as_applied(dsn):
    async with connected(dsn) as connection:
        run = await new_run(connection, await new_project(connection), count=2)
        first, second = await fetch_column(connection, TARGET_ROWS, (run,))
        for status in RUN_WAYS["APPLYING"]:
            await move_runs(connection, {run: status}, WORKER)
        await move_targets(connection, [Move(one, TARGET_WAYS["APPLIED"]) for one in (first, second)], WORKER)
        await move_runs(connection, {run: "APPLIED"}, WORKER)
        await move_targets(connection, [Move(first, ("ROLLED_BACK",))], BY)
        await validate_run_state(connection, run)
        assert await fetch_value(connection, "SELECT applied_at FROM rule_targets WHERE id = %s", (first,)) is not None


@pytest.mark.req("PRC-27", "PRC-78")
async def test_a_run_whose_targets_contradict_it_is_found(dsn):
    async with connected(dsn) as connection:
        run = await new_run(connection, await new_project(connection), count=2)
        for status in RUN_WAYS["FAILED"]:
            await move_runs(connection, {run: status}, WORKER)
        await validate_run_state(connection, run)
        await move_targets(
            connection,
            [Move(one, ("QUEUED",)) for one in await fetch_column(connection, TARGET_ROWS, (run,))],
            BY,
        )
        with pytest.raises(Conflict, match=r"Run marked FAILED but has unfinished targets \(rule run 1: 2 QUEUED\)"):
            await validate_run_state(connection, run)
        with pytest.raises(NotFound):
            await validate_run_state(connection, 999)


@pytest.mark.req("PRC-27")
@pytest.mark.parametrize("status", ["FAILED", "QUEUED", "APPLYING"])
def test_an_applied_run_with_targets_that_are_not_is_a_contradiction(status):
    assert contradiction("APPLIED", {"APPLIED": 3, status: 1}) == "Run marked APPLIED but has failed targets"
    assert contradiction("APPLIED", {"APPLIED": 3, "PREVIEW": 1, "ROLLED_BACK": 1}) is None


@pytest.mark.req("G-13", "PRC-05", "PRC-06", "PRC-07", "ENG-94")
@pytest.mark.parametrize(
    ("counts", "status"),
    [
        ({"APPLIED": 3}, "APPLIED"),
        ({"APPLIED": 3, "FAILED": 1}, "PARTIAL"),
        ({"FAILED": 4}, "FAILED"),
        ({"ROLLED_BACK": 1, "FAILED": 1}, "PARTIAL"),
        ({"APPLIED": 1, "PREVIEW": 9}, "APPLIED"),
    ],
)
def test_the_status_of_a_finished_run_follows_the_counts(counts, status):
    assert status_by_counts(counts) == status
