"""Pages of one target, of the runs that selected it, and of audits: everything that is known, and nothing of others."""

from __future__ import annotations

import psycopg
import pytest

from ecluse.engine.runs.redrive import MAY_HEAL
from ecluse.web.advice import NOTHING, RECORD, advice
from tests.support.api_server import new_key
from tests.support.automation_rows import WITHOUT_URL
from tests.support.pages import text

WORK = """
WITH lane AS (INSERT INTO lanes (name) VALUES ('of ' || %(target)s) RETURNING id),
claim AS (INSERT INTO claims (replica_id, run_id, stage, lane_id, taken, failed, taken_at)
          SELECT 'r', %(run)s, 'read', id, 1, 1, ecluse_now() FROM lane RETURNING id, lane_id),
item AS (INSERT INTO items (tenant_id, run_id, flow, stage, key, target, lane_id, due_at, claim_id, status, executions,
             error_code, error, finished_at)
         SELECT 'default', %(run)s, 'test', 'read', 'part 1', %(target)s, lane_id, ecluse_now(), id, 'failed', 2,
                'VENDOR_UNAVAILABLE', 'answered 503', ecluse_now() FROM claim RETURNING id),
tries AS (INSERT INTO attempts (run_id, item_id, event_id, round, execution, at, replica_id, error_code, error,
              ambiguous, http_status)
          SELECT %(run)s, id, 'e', 0, n, '2026-03-02 10:01:00Z', 'replica-' || n, 'VENDOR_UNAVAILABLE', 'try ' || n,
                 n = 2, 503 FROM item, generate_series(1, 2) n),
writes AS (INSERT INTO effects (id, tenant_id, run_id, item_id, stage, key, target, round, class, state, wanted, sends,
               claim_id, quiet, last_send_at)
           SELECT gen_random_uuid(), 'default', %(run)s, item.id, 'read', 'part 1', %(target)s, 0, 'C1', 'unknown',
                  '{"price": 7}', 1, claim.id, '1 s', ecluse_now() FROM item, claim)
INSERT INTO run_log (run_id, at, level, message, targets) VALUES (%(run)s, ecluse_now(), 'error', 'model down',
    ARRAY[%(target)s])
"""


def test_a_target_is_shown_with_its_attempts_its_effects_and_its_log(reader, pages_dsn, ended_run):
    run_id = ended_run(("T-7", "failed", "VENDOR_UNAVAILABLE", "three times"), status="failed", state="failed")
    with psycopg.connect(pages_dsn, autocommit=True) as connection:
        connection.execute(WORK, {"run": run_id, "target": "T-7"})
    shown = reader.shown(f"/ui/runs/{run_id}/targets/T-7")
    assert "T-7 in run" in shown
    assert "failed VENDOR_UNAVAILABLE three times A redrive may succeed once the vendor answers again." in shown
    assert "read part 1 failed of T-7 2 2026-03-02 10:01:00 VENDOR_UNAVAILABLE HTTP 503 try 1 on replica-1" in shown
    assert "try 2 may have been applied on replica-2" in shown
    assert 'read part 1 unknown 1 {"price": 7}' in shown
    assert "error model down (T-7)" in shown
    assert f'href="/ui/runs/{run_id}/targets/T-7"' in reader.get(f"/ui/runs/{run_id}").body.decode()


@pytest.mark.parametrize("flow", ["automation", "transcription", "audit"])
def test_runs_of_fiches_show_recordings_transcripts_and_audits_of_a_target(reader, ended_run, audited, flow):
    run_id = ended_run((f"of-{flow}", "successful", None, None), flow=flow)
    audit_id = audited(f"of-{flow}", run_id)
    shown = reader.shown(f"/ui/runs/{run_id}/targets/of-{flow}")
    assert f"of-{flow}-1 2026-03-02 10:01:00 , 61 s, transcribed Yes, I agree." in shown
    assert f"Compliance #{audit_id} of this run completed 90.00" in shown


def test_configs_are_listed_with_the_number_of_their_steps(reader, fill):
    made = fill(
        "INSERT INTO audit_configs (tenant_id, name, steps, created_at, updated_at)"
        """ VALUES ('default', 'Counted', '[{"name": "a"}, {"name": "b"}]', ecluse_now(), ecluse_now()) RETURNING id"""
    )
    assert f"Counted #{made} active 2 " in reader.shown("/ui/audits")


def test_an_audit_is_shown_in_full_and_found_by_its_fiche(reader, audited):
    audit_id = audited("171234")
    full = reader.shown(f"/ui/audits/{audit_id}")
    assert "90.00 of 100" in full
    assert "Consent 4.5 of 5, weight 2 Clear. I agree recording c-1, character 5" in full
    assert "never said this quote is in no transcript" in full
    assert f'href="/ui/audits/{audit_id}"' in reader.get("/ui/audits?fiche_id=171234").body.decode()
    assert f'href="/ui/audits/{audit_id}"' not in reader.get("/ui/audits?fiche_id=other").body.decode()
    assert "No matching audits" in reader.shown("/ui/audits?status=failed")


def test_a_target_that_waits_or_will_fail_says_why(reader, pages_dsn, fill):
    client = reader.client.with_key(new_key(pages_dsn))
    run_id = int(client.post("/api/runs", {"flow": "test", "input": {"targets": ["a"]}}).json["run_id"])
    fill("INSERT INTO outcomes (run_id, target) VALUES (%s, '900'), (%s, '901')", run_id, run_id)
    with psycopg.connect(pages_dsn, autocommit=True) as connection:
        connection.execute(WITHOUT_URL, {"run": run_id, "fiche": "900"})
    shown = reader.shown(f"/ui/runs/{run_id}/targets/900")
    assert "Will fail: NO_URL 1 of 3 recordings has no URL in the CRM" in shown
    assert "Runs started for this target transcription #" in shown
    assert "known 900-2 in run #" in shown
    lane = fill("INSERT INTO lanes (name, paused_at, paused_reason) VALUES ('shut', ecluse_now(), 'x') RETURNING id")
    fill(
        "INSERT INTO items (tenant_id, run_id, flow, stage, key, target, lane_id, due_at)"
        " VALUES ('default', %s, 'test', 'read', '901', '901', %s, ecluse_now())",
        run_id,
        lane,
    )
    waiting = reader.shown(f"/ui/runs/{run_id}/targets/901")
    assert "Why it waits paused" in waiting
    assert "lane shut" in waiting


@pytest.mark.req("ENG-106")
def test_a_target_is_found_in_all_runs_of_the_tenant_and_of_no_other(reader, pages_dsn, ended_run):
    first, second = (ended_run(("once & again", "ignored", None, "no")) for _ in range(2))
    theirs = ended_run(("once & again", "failed", "BAD", "theirs"), tenant="rival")
    found = reader.get("/ui/targets?q=once+%26+again").body.decode()
    assert found.index(f"/ui/runs/{second}/targets/once%20%26%20again") < found.index(f"/ui/runs/{first}/targets/")
    assert f"/ui/runs/{theirs}/" not in found
    assert reader.get(f"/ui/runs/{theirs}/targets/once%20%26%20again").status == 404
    assert reader.get(f"/ui/runs/{first}/targets/nothing").status == 404
    assert "No run has selected this target" in reader.shown("/ui/targets?q=nothing")
    assert "Enter the id of a target" in reader.shown("/ui/targets")
    assert reader.with_key(new_key(pages_dsn, "viewer", "rival")).shown("/ui/targets?q=once+%26+again").count("#") == 1


def test_the_outcomes_are_linked_as_a_file(reader, ended_run, pages_dsn):
    run_id = ended_run(("a", "failed", "BAD", "=1+1"))
    assert f'href="/ui/runs/{run_id}/outcomes.csv" download' in reader.get(f"/ui/runs/{run_id}").body.decode()
    answer = reader.get(f"/ui/runs/{run_id}/outcomes.csv")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/csv; charset=utf-8; header=present")
    assert '"a","failed","BAD","\'=1+1"' in answer.body.decode()
    theirs = reader.with_key(new_key(pages_dsn, "admin", "rival"))
    assert theirs.get(f"/ui/runs/{run_id}/outcomes.csv").status == 404


@pytest.mark.parametrize("code", MAY_HEAL)
def test_what_may_heal_is_not_called_hopeless(code):
    assert advice(code) not in (RECORD, NOTHING)


def test_lanes_are_listed_with_what_stops_them(reader, pages_dsn, fill):
    fill(
        "INSERT INTO lanes (name, max_in_flight, per_second, paused_at, paused_by, paused_reason)"
        " VALUES ('busy one', 5, 0.5, '2026-03-02 10:00:00Z', 'ann', 'invoice 4711')"
    )
    fill("INSERT INTO lanes (name, trips, failing_since, last_failure) VALUES ('down', 1, '2026-03-02Z', 'no answer')")
    shown = reader.shown("/ui/lanes")
    assert "busy one paused by ann, since 2026-03-02 10:00:00 : invoice 4711 0 0 5 in flight, 30 per minute" in shown
    assert "down down since 2026-03-02 00:00:00 , next try with the next call: no answer" in shown
    admin = reader.with_key(new_key(pages_dsn, "admin")).get("/ui/lanes").body.decode()
    assert "/ui/do/resume_lane_now/busy%20one?back=%2Fui%2Flanes" in admin
    assert "/ui/do/pause_lane_now/down?back" in admin
    # There is a second tenant, which shares the lanes: only the administrators of the first one change them.
    assert "/ui/do/" not in reader.with_key(new_key(pages_dsn, "operator")).get("/ui/lanes").body.decode()
    theirs = text(reader.with_key(new_key(pages_dsn, "admin", "rival")).get("/ui/lanes"))
    assert "no answer" not in theirs
    assert "ann" not in theirs
