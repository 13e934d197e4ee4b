"""`ecluse prune`, `ecluse erase …` and what `ecluse doctor` says about growth."""

from __future__ import annotations

import json

import pytest

from ecluse.access.maintenance import RUNS, TENANT
from ecluse.retention.growth import GROUPS

OLD = "clock_timestamp() - interval '100 days'"
RUN = """
INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, selected, successful, failed, ignored,
                  end_cause, created_at, started_at, ended_at, input)
VALUES (%s, %s, %s, false, 'completed', 'succeeded', 0, 0, 0, 0, 'normal', {at}, {at}, {at}, %s) RETURNING id
"""


@pytest.fixture
def run(query):
    """One that ended a hundred days ago, with a line of its log."""

    def make(key="old", tenant="default", flow="transcription", at=OLD, given="{}"):
        ((run_id,),) = query(RUN.format(at=at), tenant, flow, key, given)
        query(
            "INSERT INTO run_log (run_id, at, level, message) VALUES (%s, now(), 'info', 'running -> completed')",
            run_id,
        )
        return run_id

    return make


@pytest.fixture
def fiche(query):
    def make(fiche_id, tenant="default", text="Bonjour"):
        ((cache,),) = query(
            "INSERT INTO fiche_cache (tenant_id, fiche_id, created_at, updated_at) VALUES (%s, %s, now(), now())"
            " RETURNING id", tenant, fiche_id,
        )  # fmt: skip
        query(
            "INSERT INTO recordings (fiche_cache_id, call_id, has_transcription, transcription_text, transcribed_at,"
            " created_at, updated_at) VALUES (%s, %s, true, %s, now(), now(), now())",
            cache, f"{fiche_id}-1", text,
        )  # fmt: skip
        return cache

    return make


@pytest.mark.req("G-71")
def test_a_dry_run_says_what_would_go_by_kind_and_knob_and_deletes_nothing(ecluse, query, run):
    run()
    run("young", at="clock_timestamp()")
    query("INSERT INTO workflow_logs (created_at, tenant_id, workflow, entity_type, entity_id, level, message)"
          " VALUES (now() - interval '31 days', 'default', 'w', 't', 'i', 'info', 'm')")  # fmt: skip
    answer = ecluse("prune", "--dry-run", "--json")
    assert answer.code == 0, answer.err
    *table, last = answer.out.splitlines()
    lines = {line.split("  ")[0]: line.split() for line in table}
    assert lines["runs"][1:5] == ["ECLUSE_KEEP_RUNS_DAYS", "90", "days", "2"]
    assert lines["logs"][1:5] == ["ECLUSE_KEEP_LOGS_DAYS", "30", "days", "1"]
    assert lines["audits"][1:5] == ["ECLUSE_KEEP_AUDITS_DAYS", "for", "ever", "-"]
    kinds = {kind["kind"]: kind for kind in json.loads(last)["kinds"]}
    assert (kinds["runs"]["tables"], kinds["runs"]["days"]) == ({"runs": 1, "run_log": 1}, 90)
    assert kinds["runs"]["oldest"] == kinds["runs"]["newest"] is not None
    assert query("SELECT (SELECT count(*) FROM runs), (SELECT count(*) FROM workflow_logs)") == [(2, 1)]


def test_a_prune_deletes_and_is_recorded_and_a_second_one_finds_nothing(ecluse, query, run):
    run()
    young = run("young", at="clock_timestamp()")
    answer = ecluse("prune")
    assert (answer.code, "rows deleted" in answer.out) == (0, True), answer.err
    assert query("SELECT id FROM runs") == [(young,)]
    assert query("SELECT run_id FROM run_log") == [(young,)]
    ((actor, action, subject),) = query("SELECT actor, action, subject FROM audit_trail")
    assert (actor.startswith("cli:"), action, subject) == (True, "retention.prune", "runs 2")
    assert ecluse("prune", ECLUSE_KEEP_RUNS_DAYS="0").code == 0
    assert query("SELECT count(*) FROM audit_trail") == [(1,)], "nothing was deleted"
    assert ecluse("prune", ECLUSE_KEEP_RUNS_DAYS="many").code == 2


def test_an_erasure_says_what_goes_and_does_nothing_unless_it_is_confirmed(ecluse, query, fiche):
    fiche("171234")
    answer = ecluse("erase", "fiche", "171234")
    assert (answer.code, "no terminal" in answer.err, "--yes" in answer.err) == (2, True, True)
    assert "1 recordings and transcripts" in answer.out
    assert query("SELECT count(*) FROM recordings") == [(1,)]
    assert ecluse("erase", "fiche", "171235", "--yes").code == 2


def test_a_fiche_is_erased_with_its_log_files_and_the_trail_has_counts_and_no_content(
    ecluse, query, run, fiche, tmp_path
):
    cache = fiche("171234", text="Bonjour, je suis Jeanne Martin")
    query("INSERT INTO tenants VALUES ('other', 'Other', now())")
    fiche("171234", tenant="other")
    own = run("transcribe", given='{"fiche_id": "171234"}')
    query("INSERT INTO transcription_runs (run_id, tenant_id, fiche_id, fiche_cache_id) VALUES (%s, 'default', %s, %s)",
          own, "171234", cache)  # fmt: skip
    shared = run("automation", flow="automation")
    query("ALTER TABLE outcomes DISABLE TRIGGER outcomes_insert")  # it has ended
    query("INSERT INTO outcomes VALUES (%s, '171234', 'failed', 'NO', 'Jeanne')", shared)
    query("UPDATE runs SET selected = 1, failed = 1 WHERE id = %s", shared)
    files = [tmp_path / "logs" / f"transcription-run-{own}.log"]
    files.append(tmp_path / "automation-debug-logs" / f"automation-run-{shared}.txt")
    for file in files:
        file.parent.mkdir()
        file.write_text("fiche 171234: Jeanne\nfiche 171235: Paul\n")
    answer = ecluse("erase", "fiche", "171234", "--yes", "--json", ECLUSE_DATA_DIR=str(tmp_path))
    assert answer.code == 0, answer.err
    assert "Jeanne" not in answer.out
    assert query("SELECT tenant_id FROM fiche_cache") == [("other",)]
    assert query("SELECT reason, error_code FROM outcomes") == [("[erased]", "NO")]
    assert [file.exists() for file in files] == [False, True]
    assert files[1].read_text() == "fiche 171235: Paul\n"
    ((action, subject, counts),) = query("SELECT action, subject, reason FROM audit_trail")
    assert (action, subject) == ("fiche.erase", "fiche:171234")
    assert "recordings and transcripts: 1" in counts
    assert "Jeanne" not in counts


def test_an_open_run_keeps_its_fiche_and_its_tenant_and_is_named(ecluse, query, run, fiche):
    fiche("171234")
    own = run("transcribe")
    query("INSERT INTO transcription_runs (run_id, tenant_id, fiche_id) VALUES (%s, 'default', '171234')", own)
    query("UPDATE runs SET status = 'running', state = 'running', ended_at = NULL, end_cause = NULL")
    for arguments in (("fiche", "171234"), ("tenant", "default")):
        answer = ecluse("erase", *arguments, "--yes")
        assert (answer.code, answer.out, str(own) in answer.err) == (2, "", True), answer.err
    assert query("SELECT count(*) FROM recordings") == [(1,)]
    assert query("SELECT disabled_at FROM tenants") == [(None,)]


def test_a_run_that_is_started_meanwhile_keeps_its_tenant_as_it_was(ecluse, query, run):
    """After the look, and before the tenant is disabled: here, by a trigger."""
    query("INSERT INTO tenants VALUES ('acme', 'Acme Ltd', now())")
    run(tenant="acme")
    query("CREATE FUNCTION starts() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN UPDATE runs SET status = 'running',"
          " state = 'running', ended_at = NULL, end_cause = NULL; RETURN NEW; END $$")  # fmt: skip
    query("CREATE TRIGGER starts BEFORE UPDATE ON tenants FOR EACH ROW EXECUTE FUNCTION starts()")
    answer = ecluse("erase", "tenant", "acme", "--yes")
    assert (answer.code, "has open runs" in answer.err) == (2, True), answer.err
    assert query("SELECT name, disabled_at FROM tenants WHERE id = 'acme'") == [("Acme Ltd", None)]
    assert query("SELECT action FROM audit_trail") == []


def test_every_table_that_knows_a_tenant_is_part_of_its_erasure(query):
    known = query("SELECT c.table_name FROM information_schema.columns c JOIN information_schema.tables t USING"
                  " (table_schema, table_name) WHERE column_name = 'tenant_id' AND table_schema = 'public'"
                  " AND table_type = 'BASE TABLE'")  # fmt: skip
    erased = {one.table for one in (*RUNS, *TENANT)}
    # With their runs: the writes of items, and what the transcription flow says of its runs.
    with_runs = {"effects", "transcription_runs"}
    assert {table for (table,) in known} - erased == with_runs | {"audit_trail"}


def test_a_tenant_is_erased_and_disabled_and_the_others_are_not_touched(ecluse, query, run, fiche):
    query("INSERT INTO tenants VALUES ('acme', 'Acme Ltd', now())")
    for tenant in ("acme", "default"):
        parent = run("parent", tenant=tenant)
        child = run("child", tenant=tenant)
        query("UPDATE runs SET parent_run_id = %s WHERE id = %s", parent, child)
        fiche("171234", tenant=tenant)
        query("INSERT INTO schedules (tenant_id, flow, name, zone_rules, handled_until, created_at, updated_at)"
              " VALUES (%s, 'automation', 'daily', '1', now(), now(), now())", tenant)  # fmt: skip
        query("INSERT INTO schedule_slots SELECT id, created_at, tenant_id, 'skipped', 'x', NULL, now() FROM schedules"
              " WHERE tenant_id = %s", tenant)  # fmt: skip
    query("INSERT INTO effects (id, tenant_id, run_id, item_id, stage, key, target, round, class, state, wanted,"
          " sends, claim_id, quiet, first_send_at, last_send_at) SELECT gen_random_uuid(), 'acme', id, 1, 's', 'k',"
          " 'k', 0, 'C1', 'unknown', '{}', 1, 1, '1 s', now(), now() FROM runs WHERE tenant_id = 'acme'")  # fmt: skip
    assert ecluse("keys", "create", "--tenant", "acme", "--role", "admin", "--name", "a").code == 0
    tables = {one.table for one in (*RUNS, *TENANT)} - {"pruned_runs", "audit_config_versions"}
    counts = "SELECT count(*) FROM {} WHERE tenant_id = %s"
    before = {table: query(counts.format(table), "default") for table in tables}
    answer = ecluse("erase", "tenant", "acme", "--yes", "--json")
    assert answer.code == 0, answer.err
    assert {table: query(counts.format(table), "acme") for table in tables} == {table: [(0,)] for table in tables}
    assert {table: query(counts.format(table), "default") for table in tables} == before
    assert query("SELECT count(*) FROM run_log WHERE run_id NOT IN (SELECT id FROM runs)") == [(0,)]
    assert query("SELECT id, name, disabled_at IS NOT NULL FROM tenants ORDER BY id") == [
        ("acme", "acme", True), ("default", "Default", False),
    ]  # fmt: skip
    removed = json.loads(answer.out.splitlines()[-1])["removed"]
    trail = query("SELECT action, subject, reason FROM audit_trail WHERE tenant_id = 'acme' ORDER BY id")
    assert [line[:2] for line in trail[-2:]] == [("tenant.disable", "tenant:acme"), ("tenant.erase", "tenant:acme")]
    assert all(f"{what}: {rows}" in trail[-1][2] for what, rows in removed.items()), "what was done"
    assert ecluse("verify").code == 0
    assert ecluse("erase", "tenant", "acme", "--yes").code == 0, "once more is harmless"


def growth(answer):
    return {(one["level"], one["says"]) for one in answer.json["findings"] if one["what"] == "growth"}


def test_doctor_says_how_fast_the_database_grows_and_what_it_comes_to(ecluse, query, run):
    ((_, young),) = growth(ecluse("doctor", "--json"))
    assert "after one day of runs" in young
    for n in reversed(range(20)):
        run(f"run {n}", at=f"clock_timestamp() - interval '{n} days'")
    query("ANALYZE")
    ((level, told),) = growth(ecluse("doctor", "--json"))
    assert (level, "a day over 7 days" in told, "most of it runs" in told) == ("ok", True, True), told
    assert "level off at" in told


def test_doctor_warns_where_nothing_is_deleted(ecluse, query, run):
    run()
    levels = dict(growth(ecluse("doctor", "--json", ECLUSE_KEEP_RUNS_DAYS="0")))
    assert "never deleted" in levels["warn"]
    assert "never pruned" in dict(growth(ecluse("doctor", "--json")))["warn"]
    assert ecluse("prune").code == 0
    run("older again")
    assert "warn" not in dict(growth(ecluse("doctor", "--json"))), "a sweep has just been"
    query("UPDATE pruned SET before = before - interval '2 days'")
    assert "last pruned at" in dict(growth(ecluse("doctor", "--json")))["warn"]


def test_every_table_of_the_growth_report_exists(query):
    for group in GROUPS:
        for table in group.tables:
            query(f"SELECT 1 FROM {table} LIMIT 1")  # noqa: S608 - our own names
        query(f"SELECT {group.at} FROM {group.tables[0]} LIMIT 1")  # noqa: S608 - our own names
