"""Audits as a stage of another flow's run: fiches are its targets, pairs of fiche and config its items."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from ecluse.base.ids import item_event_id
from ecluse.engine import Done, Item, ItemEnd, Lane, WorkContext, load_run
from ecluse.flows.audits.configs import ConfigVersion, resolve_configs
from ecluse.flows.audits.configs import delete as delete_config
from ecluse.flows.audits.configs import update as update_config
from ecluse.flows.audits.plan import plan_audits
from ecluse.flows.audits.store import record_failures, save_ends
from ecluse.flows.audits.transcripts import Transcripts
from ecluse.flows.audits.work import audit
from tests.support.audit_world import SAID, automation
from tests.support.vendor_clients import vendors_at

LANE = Lane("llm")
# As the playbook writes it.
PLAYBOOK = (
    "SELECT id, status, fiche_cache_id, audit_config_id FROM audits WHERE automation_run_id = {} AND is_latest = true"
)


@pytest.mark.req("AUT-22", "AUT-80", "AUT-114", "AUT-117", "AUT-192", "AUT-55", "G-40")
async def test_every_fiche_is_audited_with_every_config_under_the_runs_id(auditing, sandbox, query):
    w = await auditing(automation(sandbox))
    fiches = {str(n): await w.fiche(str(n), SAID) for n in (1000, 1001, 1002)}
    configs = [await w.config(), await w.config(name="Other")]
    run = await w.run(fiches=list(fiches), configs=configs, use_rlm=True, schedule=77)
    assert (run["status"], run["selected"], run["successful"]) == ("completed", 3, 3)
    rows = query(PLAYBOOK.format(run["id"]))
    assert Counter(row[1] for row in rows) == {"completed": 6}
    assert {row[2:] for row in rows} == {(number, config.id) for number in fiches.values() for config in configs}
    assert sorted(w.calls()) == sorted(
        f"automation-{run['id']}-audit-{fiche}-{config.id}" for fiche in fiches for config in configs
    )
    assert query(
        "SELECT DISTINCT run_id, automation_run_id, automation_schedule_id, trigger_source, use_rlm FROM audits"
    ) == [(run["id"], run["id"], 77, "automation", True)]
    payload = query("SELECT key, target, payload FROM items ORDER BY key LIMIT 1")[0]
    audit = query("SELECT id::text FROM audits WHERE fiche_id = '1000' AND audit_config_id = %s", configs[0].id)[0][0]
    about = {"fiche_cache_id": str(fiches["1000"]), "audit_config_id": str(configs[0].id), "config_version": 1}
    assert payload == (f"1000-{configs[0].id}", "1000", {"audit_id": audit, **about, "use_rlm": True})


@pytest.mark.req("AUT-80", "AUT-119")
def test_an_audits_event_id_names_run_fiche_and_config_and_its_repetition():
    assert item_event_id("automation", 12, "audit", "171234-3", 0) == "automation-12-audit-171234-3"
    assert item_event_id("automation", 12, "audit", "171234-3", 2) == "automation-12-audit-171234-3-retry-2"


@pytest.mark.req("AUT-120", "AUT-55")
async def test_a_failed_config_fails_its_fiche_with_its_error_and_both_tables_say_so(auditing, sandbox, query):
    w = await auditing(automation(sandbox))
    await w.fiche("1000", SAID)
    await w.fiche("1001", SAID)
    configs = [await w.config(), await w.config(name="Other")]
    sandbox.set_faults([{"kind": "chat_refusal", "vendor": "llm", "ids": [f"automation-1-audit-1000-{configs[1].id}"]}])
    run = await w.run(fiches=["1000", "1001"], configs=configs)
    assert (run["status"], run["successful"], run["failed"]) == ("partial", 1, 1)
    ((reason, code),) = query("SELECT reason, error_code FROM outcomes WHERE target = '1000'")
    ((status, error_code, error),) = query(
        "SELECT status, error_code, error FROM audits WHERE fiche_id = '1000' AND audit_config_id = %s AND is_latest",
        configs[1].id,
    )
    assert (status, error_code, error) == ("failed", "REFUSED", reason)
    assert code == "REFUSED"
    assert Counter(row[1] for row in query(PLAYBOOK.format(run["id"]))) == {"completed": 3, "failed": 1}


@pytest.mark.req("AUT-119", "G-83")
async def test_on_stall_only_the_pairs_that_are_missing_are_sent_again(auditing, sandbox, query):
    w = await auditing(automation(sandbox, rounds=1))
    await w.fiche("1000", SAID)
    await w.fiche("1001", SAID)
    config = await w.config()
    name = f"automation-1-audit-1000-{config.id}"
    sandbox.set_faults([{"kind": "chat_empty", "vendor": "llm", "ids": [name]}])
    run = await w.run(fiches=["1000", "1001"], configs=[config])
    assert run["status"] == "completed"
    made = Counter(w.calls())
    assert made == {name: 3, f"{name}-retry-1": 1, f"automation-1-audit-1001-{config.id}": 1}
    assert query("SELECT DISTINCT status, error_code, is_latest FROM audits") == [("completed", None, True)]


@pytest.mark.req("AUT-55", "AUT-117")
async def test_what_was_planned_twice_is_there_once_and_what_never_ran_is_failed_when_its_run_ends(
    auditing, sandbox, query
):
    w = await auditing(automation(sandbox))
    await w.fiche("1000", SAID)
    config = await w.config()
    run_id = await w.start(fiches=[], configs=[])
    await w.ended(run_id)
    async with w.kit.pool.connection() as connection:
        run = await load_run(connection, run_id)
        first = await plan_audits(connection, run, ["1000", "nowhere"], [config], lane=LANE)
        assert await plan_audits(connection, run, ["1000", "nowhere"], [config], lane=LANE) == first
        assert [(item.key, item.target) for item in first] == [(f"1000-{config.id}", "1000")]
        assert query("SELECT status, is_latest FROM audits") == [("pending", False)]
        for _ in range(2):
            await record_failures(connection, [run_id])
    assert query("SELECT status, error_code, is_latest FROM audits") == [("failed", "NOT_DISPATCHED", True)]


@pytest.mark.req("G-80", "G-82")
async def test_a_result_that_is_there_is_not_paid_for_again_nor_written_over(auditing, sandbox, query):
    w = await auditing()
    await w.fiche("1000", SAID)
    config = await w.config()
    run = await w.audit("1000", config)
    before = query("SELECT * FROM audits")
    ((payload,),) = query("SELECT payload FROM items")
    item = Item(1, run["id"], "default", "audit", "audit", f"1000-{config.id}", "1000", payload, 0, 0, 0, "k")
    late = {"score": 1.0, "result": {"steps": []}, "model": "m", "input_tokens": 1, "output_tokens": 1, "cost": None}
    async with w.kit.pool.connection() as connection:
        await save_ends(connection, [ItemEnd(item, "succeeded", 1, {}, late)])
    assert query("SELECT * FROM audits") == before
    # Its worker died between the two, and another has the item in hand.
    async with vendors_at(sandbox)(w.kit.clock) as vendors:
        context = WorkContext(vendors, w.kit.clock.now, pool=w.kit.pool)
        done = await audit(1_000, context, item)
    ((score,),) = query("SELECT score FROM audits")
    assert done == Done({"audit_id": payload["audit_id"], "score": float(score)}, kept=None)
    assert len(w.paid()) == 1


class Counted:
    """A pool that counts how often a connection is taken."""

    def __init__(self, pool):
        self.pool, self.times = pool, 0

    def connection(self):
        self.times += 1
        return self.pool.connection()


async def test_those_who_begin_together_share_one_look(auditing, sandbox, query):
    w = await auditing(automation(sandbox))
    configs = [await w.config(name=str(n)) for n in range(4)]
    for n in range(25):
        await w.fiche(str(n), (f"this was said in {n}",))
    run_id = await w.start(fiches=[], configs=[])
    await w.ended(run_id)
    pool, looks = Counted(w.kit.pool), Transcripts()
    context = WorkContext(None, w.kit.clock.now, pool=pool)
    async with w.kit.pool.connection() as connection:
        run = await load_run(connection, run_id)
        planned = await plan_audits(connection, run, [str(n) for n in range(25)], configs, lane=LANE)
    items = [
        Item(n, run_id, "default", "automation", "audit", new.key, new.target, new.payload, 0, 0, 0, "k")
        for n, new in enumerate(planned)
    ]
    found = await asyncio.gather(*(looks.look(context, item) for item in items))
    assert (len(found), pool.times) == (100, 1)
    for item, standing in zip(items, found, strict=True):
        assert [one.text for one in standing.recordings] == [f"this was said in {item.target}"]
        assert standing.asked.name == configs[int(item.payload["audit_config_id"]) - configs[0].id].name
    assert query("SELECT DISTINCT status FROM audits") == [("pending",)], "nothing begins in a run that has ended"


@pytest.mark.req("AUT-115", "G-40")
async def test_configs_are_those_asked_for_and_the_automatic_ones_each_once(auditing, query):
    w = await auditing()
    plain, automatic = await w.config(name="plain"), await w.config(name="automatic", run_automatically=True)
    off = await w.config(name="off", is_active=False, run_automatically=True)
    gone = await w.config(name="gone", run_automatically=True)
    query("INSERT INTO tenants (id, name, created_at) VALUES ('rival', 'rival', ecluse_now())")
    theirs = await w.config(name="theirs", tenant="rival", run_automatically=True)
    async with w.kit.pool.connection() as connection:
        await delete_config(connection, "default", gone.id)

        async def resolved(specific: list[int], use_automatic: bool) -> tuple[object, ...]:
            return tuple(await resolve_configs(connection, "default", specific, use_automatic))

        assert await resolved([], False) == ([], [], [])
        assert await resolved([], True) == ([automatic], [], [])
        assert await resolved([plain.id], False) == ([plain], [], [])
        assert await resolved([automatic.id, plain.id, plain.id], True) == ([plain, automatic], [], [])
        assert await resolved([off.id, gone.id, theirs.id, 999], True) == (
            [automatic],
            [gone.id, theirs.id, 999],
            [off.id],
        )
        await update_config(connection, "default", plain.id, {"name": "changed"})
        assert await resolved([plain.id], False) == ([ConfigVersion(plain.id, 2, "changed")], [], [])
