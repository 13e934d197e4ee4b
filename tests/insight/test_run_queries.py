"""What everybody is told about runs: counts from counters, pages that cost what they show, nothing of other tenants."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from ecluse.base.errors import NotFound, PermanentError, TransientError
from ecluse.db.query import Row
from ecluse.engine import Done, Ignored, Item, Result, Start, WorkContext
from ecluse.insight import run_queries
from ecluse.insight.remarks import remarks
from ecluse.insight.waiting import why_run
from tests.support.engine_flows import PATIENCE, flow, keys, run_to_end, stage
from tests.support.runs import start_run, wait_for_run


async def by_name(_: WorkContext, item: Item) -> Result:
    if item.key.startswith("bad"):
        raise PermanentError("refused", code="BAD")
    return Ignored("gone") if item.key.startswith("gone") else Done()


@pytest.fixture
async def connection(dsn):
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        yield connection


async def test_a_run_in_flight_shows_what_each_stage_still_has_to_do(start_kit, connection):
    release = asyncio.Event()

    async def held(_: WorkContext, item: Item) -> Result:
        if item.key == "t0":
            return Done()
        await release.wait()
        return Done()

    kit = await start_kit(f := flow(stage(held)), hands=3)
    names = [f"t{n}" for n in range(10)]
    started = await start_run(kit, Start(f, "key", input={"targets": names}))
    while True:
        shown = await run_queries.show_run(connection, "default", started.run.id)
        if shown["stages"] and (shown["stages"][0]["done"], shown["stages"][0]["expected"]) == (1, 10):
            break
        await asyncio.sleep(0.02)
    (work,) = shown["stages"]
    assert work["done"] + work["failed"] + work["ignored"] + work["in_flight"] + work["waiting"] == 10
    assert work["in_flight"] >= 1
    assert work["deadline_at"] > work["started_at"]
    assert (work["round"], work["ended_at"]) == (0, None)
    assert shown["outcomes"] == {"open": 10}
    release.set()
    ended = await wait_for_run(kit, started.run.id, PATIENCE)
    assert ended["outcomes"] == {"successful": 10}
    assert [(s["done"], s["waiting"], s["in_flight"], s["end_cause"]) for s in ended["stages"]] == [(10, 0, 0, "done")]


async def test_what_has_failed_for_good_is_said_to_fail_while_the_run_goes_on(start_kit, connection):
    release = asyncio.Event()

    async def work(_: WorkContext, item: Item) -> Result:
        if item.key.startswith("bad"):
            raise PermanentError("refused", code="BAD")
        if item.key == "late":
            raise TransientError("down", code="DOWN", ambiguous=False)
        await release.wait()
        return Done()

    kit = await start_kit(f := flow(stage(work)))
    run_id = (await start_run(kit, Start(f, "key", input={"targets": ["a", "bad1", "bad2", "late"]}))).run.id
    while (shown := await run_queries.show_run(connection, "default", run_id))["will_fail"]["count"] < 3:
        await asyncio.sleep(0.02)
    assert shown["will_fail"] == {"count": 3, "codes": {"BAD": 2, "DOWN": 1}}
    remark = (await remarks(connection, run_id, await why_run(connection, "default", run_id))).remark
    async with connection.transaction(force_rollback=True):
        await connection.execute("DELETE FROM items WHERE run_id = %s AND target LIKE 'bad%%'", (run_id,))
        left = (await remarks(connection, run_id, await why_run(connection, "default", run_id))).remark
    assert "1 target is known to fail: a stage may count it as waiting until it ends, the causes do not" in left
    assert "3 targets are known to fail: a stage may count them as waiting until it ends, the causes do not" in remark
    shown = await results_of(connection, run_id)
    rows = shown["outcomes"]
    assert (shown["will_fail"], shown["unsettled"]) == (3, False)
    assert [(row["target"], row["outcome"], row["will_fail"]) for row in rows] == [
        ("bad1", None, {"code": "BAD", "reason": "refused"}),
        ("bad2", None, {"code": "BAD", "reason": "refused"}),
        ("late", None, {"code": "DOWN", "reason": "down"}),
        ("a", None, None),
    ]
    told = [(row["outcome"], row["why"], row["count"]) for row in shown["reasons"]]
    assert told == [("will fail", "BAD", 2), ("will fail", "DOWN", 1), ("open", None, 1)]
    for outcome, targets in (("will fail", ["bad1", "bad2", "late"]), ("open", ["bad1", "bad2", "late", "a"])):
        rows = (await results_of(connection, run_id, outcome=outcome))["outcomes"]
        assert [row["target"] for row in rows] == targets
    rows = (await results_of(connection, run_id, outcome="will fail", why="DOWN"))["outcomes"]
    assert [row["target"] for row in rows] == ["late"]
    listed = await run_queries.list_outcomes(connection, "default", run_id, after="bad1", limit=2)
    assert [(row["target"], row["will_fail"]["code"]) for row in listed] == [("bad2", "BAD"), ("late", "DOWN")]
    release.set()
    ended = await wait_for_run(kit, run_id, PATIENCE)
    assert (ended["outcomes"], ended["will_fail"]) == (
        {"successful": 1, "BAD": 2, "DOWN": 1},
        {"count": 0, "codes": {}},
    )


async def results_of(connection, run_id, **wanted):
    return await run_queries.results(connection, run_id, reasons=10, limit=10, **wanted)


def scans(plan, table):
    """How often the plan's nodes on this table were run."""
    own = plan["Actual Loops"] if plan.get("Relation Name") == table else 0
    return own + sum(scans(below, table) for below in plan.get("Plans", ()))


@pytest.mark.parametrize("name", ["CODES", "OUTCOMES", "RESULTS"])
async def test_what_is_known_to_fail_is_not_looked_for_in_a_run_that_has_ended(start_kit, connection, query, name):
    kit = await start_kit(f := flow(stage(by_name)))
    run_id = (await run_to_end(kit, f, ["a", "bad"]))["id"]
    statement = getattr(run_queries, name).format(where="") if name == "OUTCOMES" else getattr(run_queries, name)
    given = {"run": run_id, "outcome": None, "why": None, "reasons": 10, "limit": 10, "offset": 0}

    async def looked() -> int:
        cursor = await connection.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", given)
        ((plans,),) = await cursor.fetchall()
        return sum(scans(plans[0]["Plan"], table) for table in ("items", "claims", "run_waiters"))

    assert await looked() == 0
    query("ALTER TABLE runs DISABLE TRIGGER USER")
    query("UPDATE runs SET ended_at = NULL, end_cause = NULL, status = 'running', state = 'running'")
    assert await looked() > 0, "of an open run it is"


async def test_the_counts_shown_are_those_of_the_rows(start_kit, connection, one):
    kit = await start_kit(f := flow(stage(by_name)))
    row = await run_to_end(kit, f, ["a", "b", "bad", "gone1", "gone2"])
    (counted,) = row["stages"]
    rows = "SELECT count(*) FILTER (WHERE status = %s) FROM items"
    told = {"succeeded": counted["done"], "failed": counted["failed"], "ignored": counted["ignored"]}
    assert told == {status: one(rows, status) for status in told} == {"succeeded": 2, "failed": 1, "ignored": 2}
    assert row["outcomes"] == {"successful": 2, "IGNORED": 2, "BAD": 1}


async def test_lists_are_filtered_paged_and_newest_first(start_kit, connection):
    kit = await start_kit(f := flow(stage(by_name)), g := flow(stage(by_name, name="other"), name="other"))
    ids = []
    for number, (which, tenant, target) in enumerate([(f, "a", "x"), (f, "b", "bad"), (g, "a", "x"), (f, "a", "x")]):
        start = Start(which, f"k{number}", tenant_id=tenant, input={"targets": [target]})
        ids.append((await start_run(kit, start)).run.id)
    for run_id in ids:
        await wait_for_run(kit, run_id, PATIENCE)

    async def listed(tenant: str, limit: int = 50, offset: int = 0, **filters: str) -> list[int]:
        rows = await run_queries.list_runs(connection, tenant=tenant, limit=limit, offset=offset, **filters)
        return [ids.index(row["id"]) for row in rows]

    assert await listed("b") == [1]
    assert await listed("a") == [3, 2, 0]
    assert await listed("a", flow=f.name) == [3, 0]
    assert await listed("b", state="failed") == [1]
    assert await listed("a", state="succeeded") == await listed("a", state="completed") == [3, 2, 0]
    assert await listed("a", limit=1, offset=1) == [2]
    assert await listed("nobody") == []


async def test_the_log_of_a_run_is_paged(start_kit, connection):
    kit = await start_kit(f := flow(stage(by_name)))
    row = await run_to_end(kit, f, ["a", "b", "bad"])
    run_id = row["id"]
    log = await run_queries.list_log(connection, "default", run_id, limit=100, offset=0)
    assert [entry["id"] for entry in log] == sorted(entry["id"] for entry in log)
    assert await run_queries.list_log(connection, "default", run_id, limit=2, offset=1) == log[1:3]


async def test_every_outcome_is_read_once_however_many_pages_they_are(start_kit, connection):
    kit = await start_kit(f := flow(stage(by_name)))
    row = await run_to_end(kit, f, ["", *keys(20)])
    rows: list[Row] = []
    while page := await run_queries.list_outcomes(
        connection, "default", row["id"], after=rows[-1]["target"] if rows else None, limit=7
    ):
        rows += page
    assert [one["target"] for one in rows] == sorted(["", *keys(20)])
    assert {one["outcome"] for one in rows} == {"successful"}


async def test_a_run_of_somebody_else_does_not_exist(start_kit, connection):
    kit = await start_kit(f := flow(stage(by_name)))
    started = await start_run(kit, Start(f, "key", tenant_id="acme", input={"targets": ["a"]}))
    await wait_for_run(kit, started.run.id, PATIENCE)
    for run_id, tenant in [(started.run.id, "rival"), (4711, "acme")]:
        for read in (run_queries.show_run, run_queries.list_log):
            page = {} if read is run_queries.show_run else {"limit": 1, "offset": 0}
            with pytest.raises(NotFound, match=f"There is no run {run_id}"):
                await read(connection, tenant, run_id, **page)
        with pytest.raises(NotFound):
            await run_queries.list_outcomes(connection, tenant, run_id, after=None, limit=1)


@pytest.mark.parametrize(
    ("targets", "reason"),
    [
        (["bad1", "bad2", "bad3"], "all 3 targets failed: BAD"),
        (["bad1"], "the only target failed: BAD"),
        (["bad1", "bad2", "gone"], "2 of 3 targets failed, each of them: BAD"),
        (["bad1", "other"], None),
        (["bad1", "good"], None),
    ],
)
async def test_a_run_whose_targets_failed_alike_says_so(start_kit, connection, targets, reason):
    async def work(context: WorkContext, item: Item) -> Result:
        if item.key == "other":
            raise PermanentError("refused otherwise", code="WORSE")
        return await by_name(context, item)

    kit = await start_kit(f := flow(stage(work)))
    ended = await run_to_end(kit, f, targets)
    assert ended["reason"] == reason
    await connection.execute("UPDATE runs SET reason = 'its own'")
    assert (await run_queries.show_run(connection, "default", ended["id"]))["reason"] == "its own"
