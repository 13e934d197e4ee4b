"""Retention over the flows in the box: automation with its transcriptions, audits, redrives and deliveries."""

from __future__ import annotations

from datetime import timedelta

import pytest

from ecluse.bootstrap import load_flows, retention_rules
from ecluse.engine import Choice, Start, load_run, redrive
from ecluse.flows.automation import queries, schedules
from ecluse.flows.transcriptions import queries as transcriptions
from ecluse.flows.transcriptions.start import start
from ecluse.notify.flow import working
from ecluse.retention.pace import Pace
from ecluse.retention.sweep import OldRuns, foresee, prune
from ecluse.settings import Settings
from ecluse.verify import audit
from tests.support.audit_world import PATIENCE, by_hand
from tests.support.automation_trouble import Deaf, maker, move
from tests.support.fiche_rows import details, save
from tests.support.notify_world import new_secrets, receiving, setup_of
from tests.support.runs import start_run, wait_for_run
from tests.support.transcription_world import ONE_BLANK, until

PUBLISHED = "SELECT count(*) FROM events_outbox WHERE published_seq IS NULL"
OPEN = "SELECT count(*) FROM runs WHERE ended_at IS NULL"
# What a run leaves, whatever its flow.
OF_RUNS = (
    "runs", "stages", "items", "claims", "attempts", "outcomes", "run_log", "run_waiters", "transcription_runs",
    "automation_run_facts", "automation_run_fiches", "deliveries",
)  # fmt: skip
RESULTS = ("fiche_cache", "recordings", "recording_transcription_chunks", "audits")


@pytest.fixture
def counted(query):
    def count(*tables: str) -> dict[str, int]:
        return {table: query(f"SELECT count(*) FROM {table}")[0][0] for table in tables}  # noqa: S608

    return count


def later(query, days: float) -> None:
    query('UPDATE clock_offset SET "offset" = "offset" + %s', timedelta(days=days))


async def pruned(connection, flows, **knobs: int) -> dict[str, int]:
    rules = retention_rules(Settings(**knobs), flows)
    done = await prune(connection, {flow.name: flow for flow in flows}, rules, pace=Pace(rest=0))
    return {one.rule.kind.name: one.rows.total() for one in done if one.rows.total()}


async def a_busy_day(world, connection, receiver, secrets) -> dict[str, int]:
    """A run that fails in part, told to a webhook; its redrive; a transcription and an audit by hand."""
    config = await world.config()
    world.sandbox.set_faults([{"kind": "server_error", "vendor": "crm", "ids": ["1001"], "times": 1}])
    schedule = await world.schedule(
        "1000",
        "1001",
        ONE_BLANK,
        secrets=secrets,
        webhook_url=receiver.url,
        notify_on_complete=True,
        notify_on_error=True,
    )
    first = await world.trigger(schedule)
    assert (await world.ended(first))["status"] == "partial"
    again = (await redrive(connection, world.flow, await load_run(connection, first), Choice())).run.id
    await world.ended(again)
    by_name = world.kit.by_name
    (alone,) = await start(connection, by_name["transcription"], "default", ["1002"], event_ids=["by-hand"])
    await wait_for_run(world.kit, alone.run_id, PATIENCE)
    given = {"fiche_id": "1000", "audit_config_id": str(config)}
    audited = (await start_run(world.kit, Start(by_name["audit"], "audit-by-hand", input=given))).run.id
    await wait_for_run(world.kit, audited, PATIENCE)
    await until(lambda: world.query(PUBLISHED) == [(0,)] and world.query(OPEN) == [(0,)])
    return {"schedule": schedule, "first": first, "again": again, "alone": alone.run_id, "audit": audited}


@pytest.mark.req("G-71", "TRX-13")
async def test_old_runs_go_with_all_their_rows_and_the_results_stay(automate, connection, query, counted, dsn, sandbox):
    secrets = new_secrets()
    async with receiving() as receiver:
        world = await automate(by_hand(sandbox).flow, working(setup_of(dsn, secrets)))
        ids = await a_busy_day(world, connection, receiver, secrets)
        flows = list(world.kit.flows)
        assert await pruned(connection, flows) == {}, "nothing is old"
        before = counted(*RESULTS)
        assert min(counted(*OF_RUNS, "speech_results", "leases").values()) > 0
        later(query, 100)
        newest = await world.trigger(ids["schedule"], fiche_ids=["1000"])
        await world.ended(newest)
        await until(lambda: query(PUBLISHED) == [(0,)] and query(OPEN) == [(0,)])
    await world.kit.stop()
    kept = [row[0] for row in query("SELECT id FROM runs WHERE id >= %s ORDER BY id", newest)]
    rules = retention_rules(Settings(), flows)
    foreseen = {one.rule.kind.name: one for one in await foresee(connection, world.kit.by_name, rules)}
    done = await pruned(connection, flows)
    assert foreseen["runs"].rows["runs"] >= 6
    assert foreseen["deliveries"].rows["deliveries"] >= 2
    assert {"events", "leases", "paid results", "workflows", "runs", "deliveries"} <= set(done)
    assert [row[0] for row in query("SELECT id FROM runs ORDER BY id")] == kept
    for table in ("items", "outcomes", "stages", "claims", "run_log", "transcription_runs", "automation_run_fiches"):
        assert query(f"SELECT count(*) FROM {table} WHERE run_id <> ALL(%s)", kept) == [(0,)], table  # noqa: S608
    assert counted("speech_results", "deliveries", "pruning") == {"speech_results": 0, "deliveries": 1, "pruning": 0}
    for table, rows in before.items():
        assert counted(table)[table] >= rows, table
    report = audit(dsn, world.sandbox.url)
    assert report.violations == [], report.text()
    assert await pruned(connection, flows) == {}
    # What people look at still answers.
    shown = await queries.show_schedule_in_full(connection, "default", ids["schedule"], timedelta(hours=1))
    assert ([run["id"] for run in shown["runs"]], shown["total_runs"]) == ([newest], 3)
    status = await transcriptions.status(connection, "default", "1002")
    assert (status["transcribed"] > 0, status["percentage"], status["run"]) == (True, 100, None)


async def test_audits_and_fiches_go_only_by_their_own_knobs_and_after_their_runs(
    automate, connection, query, counted, dsn
):
    world = await automate()
    await world.config()
    run = await world.run_over("1000", "1001")
    await until(lambda: query(PUBLISHED) == [(0,)] and query(OPEN) == [(0,)])
    await world.kit.stop()
    flows = list(world.kit.flows)
    later(query, 100)
    knobs = {"ECLUSE_KEEP_AUDITS_DAYS": 30, "ECLUSE_KEEP_FICHES_DAYS": 30}
    assert not {"audits", "fiches"} & set(await pruned(connection, flows, **knobs)), "the schedule's last run is kept"
    assert audit(dsn, world.sandbox.url).violations == []
    query("UPDATE schedules SET last_run_id = NULL")
    done = await pruned(connection, flows, **knobs)
    assert (done["audits"], done["fiches"]) == (2, 2), run
    assert set(counted("runs", *RESULTS).values()) == {0}
    assert audit(dsn, world.sandbox.url).violations == []


async def test_runs_that_go_on_are_not_disturbed(automate, connection, query, dsn):
    world = await automate()
    await world.config()
    old = await world.run_over("1000", "1001")
    await until(lambda: query(PUBLISHED) == [(0,)] and query(OPEN) == [(0,)])
    query("UPDATE schedules SET last_run_id = NULL")
    # Rows, not the clock: what is open goes on by it.
    query("UPDATE runs SET ended_at = ended_at - interval '100 days'")
    world.sandbox.set_faults([{"kind": "latency", "vendor": "elevenlabs", "seconds": 0.3}])
    schedule = await world.schedule("1002", "1003", "1004")
    open_run = await world.trigger(schedule)
    await until(lambda: query("SELECT count(*) FROM runs WHERE parent_run_id = %s", open_run) == [(3,)])
    done = await pruned(connection, list(world.kit.flows))
    assert done["runs"] > 0
    run = await world.ended(open_run)
    assert (run["status"], run["successful_fiches"]) == ("completed", 3), world.logs(open_run)
    assert query("SELECT count(*) FROM runs WHERE id = %s OR parent_run_id = %s", old["id"], old["id"]) == [(0,)]
    await until(lambda: query(PUBLISHED) == [(0,)])
    report = audit(dsn, world.sandbox.url)
    assert report.violations == [], report.text()


async def test_a_run_that_had_the_transcripts_of_another_outlives_it(automate, connection, query, dsn):
    world = await automate()
    await world.config()
    world.sandbox.set_faults([{"kind": "latency", "vendor": "elevenlabs", "seconds": 1}])
    first = await world.trigger(await world.schedule("1000", "1001"))
    await until(lambda: query("SELECT count(*) FROM runs WHERE parent_run_id = %s", first) == [(2,)])
    second = await world.trigger(await world.schedule("1001", "1002"))
    for run in (first, second):
        assert (await world.ended(run))["status"] == "completed"
    await until(lambda: query(PUBLISHED) == [(0,)] and query(OPEN) == [(0,)])
    await world.kit.stop()
    family = [row[0] for row in query("SELECT id FROM runs WHERE %s IN (id, parent_run_id) ORDER BY id", first)]
    shared = query("SELECT run_id FROM run_waiters WHERE waiter_run_id = %s AND run_id = ANY(%s)", second, family)
    assert len(shared) == 1
    query("UPDATE schedules SET last_run_id = NULL WHERE last_run_id = %s", first)
    query("UPDATE runs SET ended_at = ended_at - interval '100 days' WHERE id = ANY(%s)", family)
    flows = list(world.kit.flows)
    present = "SELECT count(*) FROM runs WHERE id = ANY(%s)"
    await pruned(connection, flows)
    assert query(present, family) == [(3,)], "the second is young"
    # The last run of its schedule, and old: it stays, and what it had from the first one goes with that.
    query("UPDATE runs SET ended_at = ended_at - interval '100 days' WHERE id <> ALL(%s)", family)
    await pruned(connection, flows)
    assert (query(present, family), query(present, [second])) == ([(0,)], [(1,)])
    report = audit(dsn, world.sandbox.url)
    assert report.violations == [], report.text()
    shown = await queries.list_fiches(connection, "default", second, limit=10, offset=0)
    assert [(row["fiche_id"], row["status"]) for row in shown] == [("1001", "successful"), ("1002", "successful")]


async def test_a_fiche_of_an_open_run_stays_however_old_it_is(start_kit, sandbox, connection, query):
    fiches = Deaf("fiche", "1000")
    world = await maker(start_kit, sandbox, query)(fiches=fiches)
    await save(connection, ("1000", details()), ("7777", details()))
    query("UPDATE fiche_cache SET created_at = created_at - interval '100 days', updated_at = created_at - interval"
          " '100 days'")  # fmt: skip
    run = await world.trigger(await world.schedule("1000", run_transcription=False, run_audits=False))
    await fiches.asked.wait()
    assert (await pruned(connection, list(world.kit.flows), ECLUSE_KEEP_FICHES_DAYS=30)).get("fiches") == 1
    assert query("SELECT fiche_id FROM fiche_cache") == [("1000",)]
    fiches.let.set()
    assert (await world.ended(run))["status"] == "completed"


async def test_the_secrets_of_a_deleted_schedule_go_once_nothing_needs_them(start_kit, sandbox, connection, query, dsn):
    secrets, fiches = new_secrets(), Deaf("fiche", "1000")
    async with receiving(500, 204) as receiver:
        make, reading_keys = maker(start_kit, sandbox, query), {"read_secret": secrets.get}
        world = await make(working(setup_of(dsn, secrets)), fiches=fiches, crm=reading_keys)
        left = "SELECT name FROM secrets WHERE name LIKE 'schedule:%%' ORDER BY 1"
        told = {"webhook_url": receiver.url, "notify_on_complete": True, "external_api_key": "its own"}
        only = {"run_transcription": False, "run_audits": False}
        schedule = await world.schedule("1000", secrets=secrets, **told, **only)
        await schedules.rotate_secret(connection, "default", schedule, secrets=secrets)
        own, signing = f"schedule:{schedule}", [f"schedule:{schedule}:webhook{end}" for end in ("", ":old", ":url")]
        run = await world.trigger(schedule)
        await fiches.asked.wait()
        await schedules.delete(connection, "default", schedule)
        query("UPDATE secrets SET updated_at = updated_at - interval '2 days'")
        await pruned(connection, list(world.kit.flows))
        assert [name for (name,) in query(left)] == [own, *signing], "a run needs them"
        fiches.let.set()
        await world.ended(run)
        assert [name for (name,) in query(left)] == signing, "a delivery needs them"
        await until(lambda: len(receiver.got) == 1)
        await pruned(connection, list(world.kit.flows))
        assert [name for (name,) in query(left)] == signing, "it is to be tried again"
        move(query, timedelta(minutes=1))
        await until(lambda: len(receiver.got) == 2 and query(OPEN) == [(0,)])
        assert "webhook-signature" in receiver.got[1].headers
        await pruned(connection, list(world.kit.flows))
        assert query(left) == []


async def test_fiches_go_by_their_last_change_in_whatever_order_they_came(connection, query):
    query("INSERT INTO fiche_cache (tenant_id, fiche_id, created_at, updated_at) SELECT 'default', n::text,"
          " now() - interval '200 days', now() - CASE WHEN n <= 1000 THEN interval '1 day' ELSE interval '100 days' END"
          " FROM generate_series(1, 1500) AS n")  # fmt: skip
    rules = [rule for rule in retention_rules(Settings(ECLUSE_KEEP_FICHES_DAYS=30), []) if rule.kind.name == "fiches"]
    left: list[int] = []

    class Watched(Pace):
        def paced(self, took):
            left.extend(query("SELECT count(*) FROM fiche_cache")[0])
            super().paced(took)

    await prune(connection, {}, rules, pace=Watched(rows=200, most=200, rest=0))
    assert query("SELECT count(*), max(fiche_id::int) FROM fiche_cache") == [(1000, 1000)]
    assert left == [1500, 1500, 1500, 1500, 1500, 1300, 1100, 1000], "a page at a time"
    # A fetch that finds nothing new changes these, and is a HOT update.
    changed = {"updated_at", "fetched_at", "last_revalidated_at"}
    indexed = query("SELECT a.attname FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum ="
                    " ANY(i.indkey) WHERE i.indrelid = 'fiche_cache'::regclass")  # fmt: skip
    assert changed & {name for (name,) in indexed} == set()


def test_every_knob_has_a_rule_and_zero_keeps_for_ever():
    rules = retention_rules(Settings(**{name: 0 for name in Settings.model_fields if "_KEEP_" in name}), [])
    knobs = {name for name in Settings.model_fields if "_KEEP_" in name}
    own = {"ECLUSE_KEEP_COMPANIES_DAYS"}  # companies are erased by the sweep of their flow, which notes it in the trail
    assert {rule.knob for rule in rules if rule.knob} == knobs - own
    assert [rule.kind.name for rule in rules if rule.keep] == [
        "idempotency keys",
        "requests",
        "secrets",
        "payloads of jobs",
    ]
    defaults = {rule.kind.name: rule.keep and rule.keep.days for rule in retention_rules(Settings(), [])}
    assert defaults == {
        "idempotency keys": 1, "requests": 1, "secrets": 1, "events": 30, "logs": 30, "attempts": 30, "slots": 90,
        "payloads of jobs": 1, "jobs": 90, "workflows": 7, "paid results": 30, "costs of paid calls": 400,
        "leases": 7, "audit trail": None, "deliveries": 14, "runs": 90,
        "audits": None, "rule runs": 400, "fiches": None,
    }  # fmt: skip
    kinds = [rule.kind for rule in retention_rules(Settings(), load_flows(Settings()))]
    flows = {kind.name: set(kind.flows) for kind in kinds if isinstance(kind, OldRuns)}
    box = {"automation", "audit", "transcription", "pricing", "jobs", "enrichment"}
    assert flows == {"deliveries": {"notifications"}, "runs": box}
