"""What stands on the pages: the same facts as by the API, in pages, escaped, with a word where there is nothing."""

from __future__ import annotations

import re

import psycopg
import pytest

from tests.support.api_server import new_key
from tests.support.automation_rows import NO_URL, WITHOUT_URL
from tests.support.pages import text

EVIL = '<script>alert("x")</script><img src=x onerror=alert(1)>'
SCHEDULE = """
INSERT INTO schedules (tenant_id, flow, name, cron, timezone, enabled, zone_rules, handled_until, next_due_at,
    last_run_id, deleted_at, created_at, updated_at)
VALUES ('default', 'test', %s, %s, %s, %s, '', ecluse_now(), NULL, %s, %s, ecluse_now(), ecluse_now()) RETURNING id
"""


def schedule(fill, name, cron="30 2 * * *", zone="Europe/Paris", enabled=True, last=None, deleted=None):
    return fill(SCHEDULE, name, cron, zone, enabled, last, deleted)


def rows(shown: str) -> list[str]:
    """The numbers of the runs in a table, in their order."""
    return re.findall(r"(?:test|other|notifications) #(\d+)", shown)


def test_an_empty_page_says_how_to_begin(of):
    nobody = of("empty")
    assert "No runs yet" in nobody.shown("/ui/runs")
    for page in ("/ui/runs", "/ui/schedules"):
        shown = nobody.shown(page)
        connections = [shown.index(f"ecluse connections create {kind} ") for kind in ("crm", "speech", "llm")]
        assert max(connections) < shown.index("ecluse schedules create automation --name nightly")
    assert "No matching runs" in nobody.shown("/ui/runs?state=failed")
    assert "No schedules on this page" in nobody.shown("/ui/schedules?offset=25")


def test_a_run_is_listed_with_its_counts_its_times_and_its_schedule(of, fill, ended_run):
    mine = of("listing")
    nightly = schedule(fill, "nightly prices")
    fill("UPDATE schedules SET tenant_id = 'listing' WHERE id = %s", nightly)
    outcomes = [("a", "successful", None, None), ("b", "failed", "BAD", "no"), ("c", "ignored", None, "gone")]
    run_id = ended_run(*outcomes, tenant="listing", status="partial", state="partial", schedule=nightly)
    shown = mine.shown("/ui/runs")
    assert f"test #{run_id} nightly prices partial" in shown
    assert "1 successful, 1 failed, 1 ignored of 3" in shown
    assert "2026-03-02 10:00:00 3 min 07 s" in shown
    assert "Times are in UTC" in shown
    body = mine.get("/ui/runs").body.decode()
    assert '<time datetime="2026-03-02T10:00:00Z">2026-03-02 10:00:00</time>' in body
    assert f'href="/ui/schedules/{nightly}"' in body


def test_runs_are_paged_and_filtered_and_what_people_did_not_start_is_left_out(of, fill, ended_run):
    mine = of("paging")
    top = [ended_run(tenant="paging", flow="other" if n % 9 == 0 else "test") for n in range(30)]
    child = ended_run(tenant="paging", parent=top[0])
    delivery = ended_run(tenant="paging", flow="notifications")
    again = ended_run(
        tenant="paging", parent=top[1], schedule=schedule(fill, "redriven")
    )  # by a person, for a schedule
    failed = ended_run(("a", "failed", "BAD", None), tenant="paging", status="failed", state="failed")
    newest = [str(run) for run in [failed, again, *reversed(top)]]

    assert rows(mine.shown("/ui/runs")) == newest[:25]
    assert "1 to 25" in mine.shown("/ui/runs")
    assert 'href="?offset=25"' in mine.get("/ui/runs").body.decode()
    assert rows(mine.shown("/ui/runs?offset=25")) == newest[25:]
    assert "26 to 32" in mine.shown("/ui/runs?offset=25")
    assert "Next" not in mine.shown("/ui/runs?offset=25")
    assert rows(mine.shown("/ui/runs?flow=other&state=")) == [str(run) for run in reversed(top[::9])]
    assert rows(mine.shown("/ui/runs?state=failed&flow=")) == [str(failed)]
    assert rows(mine.shown("/ui/runs?all=1"))[:4] == [str(run) for run in (failed, again, delivery, child)]
    assert rows(mine.shown("/ui/runs?flow=notifications")) == [str(delivery)]
    under = mine.shown(f"/ui/runs?parent={top[0]}")
    assert f"Child runs of run #{top[0]}" in under
    assert rows(under) == [str(child)]
    assert 'href="?state=succeeded&amp;offset=25"' in mine.get("/ui/runs?state=succeeded").body.decode()


def test_a_run_leads_to_its_parent_its_children_and_its_schedule(reader, fill, ended_run):
    kept, gone = schedule(fill, "kept"), schedule(fill, "gone for good", deleted="2026-01-01Z")
    parent = ended_run(schedule=kept)
    child = ended_run(parent=parent, schedule=gone)
    above, below = reader.get(f"/ui/runs/{parent}").body.decode(), reader.get(f"/ui/runs/{child}").body.decode()
    assert f'href="/ui/schedules/{kept}"' in above
    assert f'href="/ui/runs/{child}"' in above
    assert f'href="/ui/runs?parent={parent}"' in above
    assert f'href="/ui/runs/{parent}"' in below
    assert "gone for good (deleted)" in below
    assert f"/ui/schedules/{gone}" not in below
    assert reader.get(f"/ui/schedules/{gone}").status == 404


def test_outcomes_are_counted_by_reason_then_shown_page_by_page_and_by_outcome(reader, ended_run):
    good = [(f"good-{n:03d}", "successful", None, None) for n in range(30)]
    bad = [(f"bad-{n:03d}", "failed", "NOT_FOUND", f"no article {n}") for n in range(27)]
    left = [("left", "ignored", None, "Skipped: earlier stage failed")]
    run_id = ended_run(*good, *bad, *left, status="partial", state="partial")
    page = f"/ui/runs/{run_id}"

    def targets(path: str) -> list[str]:
        return re.findall(r"(?:good|bad)-\d{3}|\bleft\b", reader.shown(path).partition(" Target ")[2])

    shown = reader.shown(page)
    assert "27 failed: NOT_FOUND 30 successful 1 ignored: Skipped: earlier stage failed Target" in shown
    assert targets(page) == [name for name, *_ in bad[:25]], "by target"
    worst_first = [name for name, *_ in (*bad, *left, *good)]
    assert targets(f"{page}?outcomes=25") == worst_first[25:50]
    assert targets(f"{page}?outcome=ignored") == ["left"]
    assert targets(f"{page}?outcome=failed&why=NOT_FOUND&outcomes=25") == ["bad-025", "bad-026"]
    assert "Only failed: NOT_FOUND" in reader.shown(f"{page}?outcome=failed&why=NOT_FOUND")
    body = reader.get(f"{page}?outcome=failed&why=NOT_FOUND").body.decode()
    assert "?outcome=failed&amp;why=NOT_FOUND&amp;outcomes=25#outcomes" in body
    assert 'title="no article 0"' in body
    assert "No matching outcomes" in reader.shown(f"{page}?outcome=open")


def test_the_log_is_shown_newest_first_and_page_by_page(reader, fill, ended_run):
    run_id = ended_run()
    fill(
        "INSERT INTO run_log (run_id, at, level, message, data) SELECT %s, '2026-03-02 10:00:00Z',"
        " CASE n WHEN 45 THEN 'warning' ELSE 'info' END, 'line ' || n, jsonb_build_object('n', n)"
        " FROM generate_series(1, 45) n",
        run_id,
    )

    def lines(path: str) -> list[int]:
        return [int(n) for n in re.findall(r"line (\d+)", reader.shown(path))]

    assert lines(f"/ui/runs/{run_id}") == list(range(45, 25, -1))
    assert lines(f"/ui/runs/{run_id}?log=40") == list(range(5, 0, -1))
    assert '10:00:00 warning line 45 {"n": 45}' in reader.shown(f"/ui/runs/{run_id}")


def test_a_run_that_broke_says_why_and_stages_say_how_far_they_came(reader, fill, ended_run):
    given = {"status": "failed", "state": "failed", "error_code": "CRM_AWAY", "error_message": "the CRM is away"}
    run_id = ended_run(**given)
    fill("UPDATE runs SET error_details = '{\"tried\": 3}' WHERE id = %s", run_id)
    fill(
        "INSERT INTO stages (run_id, stage, expected, started_at, deadline_at, round, progress_at, ended_at, end_cause)"
        " SELECT %s, 'details', 10, t, t, 2, t, t, 'timeout' FROM (SELECT '2026-03-02 10:02:00Z'::timestamptz AS t) at",
        run_id,
    )
    lane = fill("INSERT INTO lanes (name) VALUES ('broken') RETURNING id")
    fill(
        "INSERT INTO claims (replica_id, run_id, stage, lane_id, taken, succeeded, failed, ignored, released, taken_at)"
        " VALUES ('r', %s, 'details', %s, 8, 4, 2, 1, 0, ecluse_now())",
        run_id,
        lane,
    )
    shown = reader.shown(f"/ui/runs/{run_id}")
    assert 'CRM_AWAY the CRM is away { "tried": 3 }' in shown
    assert "details 7 of 10 finished: 4 done, 2 failed, 1 ignored, 1 in flight" in shown
    assert "10 4 2 1 1 2 3 timeout 2026-03-02 10:02:00" in shown


def test_a_run_whose_targets_are_open_says_so_instead_of_listing_them(reader, pages_dsn, fill):
    client = reader.client.with_key(new_key(pages_dsn))
    run_id = client.post("/api/runs", {"flow": "test", "input": {"targets": ["a"]}}).json["run_id"]
    assert f"test #{run_id} queued" in reader.shown("/ui/runs")
    assert "No targets selected yet" in reader.shown(f"/ui/runs/{run_id}")
    fill("INSERT INTO outcomes (run_id, target) SELECT %s, 'target-' || n FROM generate_series(1, 3) n", run_id)
    shown = reader.shown(f"/ui/runs/{run_id}")
    assert "3 open Outcomes appear when the run ends" in shown
    assert "target-1" not in shown
    assert "target-1 open target-2 open" in reader.shown(f"/ui/runs/{run_id}?outcome=open")
    fill("UPDATE outcomes SET outcome = 'ignored', reason = 'gone' WHERE run_id = %s AND target = 'target-2'", run_id)
    assert "target-2 ignored gone target-1 open" in reader.shown(f"/ui/runs/{run_id}")


def test_what_is_known_to_fail_is_shown_first_with_why_and_counted(reader, pages_dsn, fill):
    client = reader.client.with_key(new_key(pages_dsn))
    run_id = client.post("/api/runs", {"flow": "test", "input": {"targets": ["a"]}}).json["run_id"]
    fill("INSERT INTO outcomes (run_id, target) SELECT %s, (700 + n)::text FROM generate_series(1, 30) n", run_id)
    fill('UPDATE runs SET error_details = \'{"selection_incomplete": "a day is missing"}\' WHERE id = %s', run_id)
    with psycopg.connect(pages_dsn, autocommit=True) as connection:
        connection.execute(WITHOUT_URL, {"run": int(run_id), "fiche": "730"})
    fill(
        "INSERT INTO run_log (run_id, at, level, message, count, targets, fold)"
        " VALUES (%s, ecluse_now(), 'error', 'model down', 28, '{701}', 'x')",
        run_id,
    )
    shown = reader.shown(f"/ui/runs/{run_id}")
    assert "a day is missing" in shown
    assert "Outcomes 1 will fail" in shown
    assert "1 will fail: NO_URL 29 open" in shown
    assert f"Reason 730 open will fail: NO_URL {NO_URL} (730-2) 701 open" in shown
    assert "error 28 × model down (701)" in shown  # noqa: RUF001 - as it is told
    assert "730 open will fail" in reader.shown(f"/ui/runs/{run_id}?outcome=will+fail&why=NO_URL")
    assert "701 open" not in reader.shown(f"/ui/runs/{run_id}?outcome=will+fail&why=NO_URL")


@pytest.mark.req("ENG-106")
@pytest.mark.parametrize("what", ["runs", "schedules"])
def test_what_is_another_tenants_is_not_found_nor_is_what_cannot_be(reader, pages_dsn, fill, ended_run, what):
    theirs = reader.with_key(new_key(pages_dsn, "admin", "rival"))
    ours = ended_run() if what == "runs" else schedule(fill, "ours alone")
    assert reader.get(f"/ui/{what}/{ours}").status == 200
    for asker, name in (
        (theirs, str(ours)),
        (reader, "999999"),
        (reader, "0"),
        (reader, "%3Cb%3E"),
        (reader, "9" * 30),
    ):
        answer = asker.get(f"/ui/{what}/{name}")
        assert answer.status == 404
        assert "Not found There is no" in text(answer)
        assert "All runs" in text(answer)
    assert f"#{ours}" not in theirs.shown(f"/ui/{what}")
    assert "ours alone" not in theirs.shown(f"/ui/{what}")


@pytest.mark.req("ENG-106")
def test_a_childs_tenant_is_looked_at_and_not_only_its_parents(reader, pages_dsn, ended_run):
    theirs = reader.with_key(new_key(pages_dsn, "admin", "rival"))
    ours = ended_run()
    strange = ended_run(parent=ours, tenant="rival")
    assert f"#{strange}" not in reader.shown(f"/ui/runs/{ours}")
    assert rows(reader.shown(f"/ui/runs?parent={ours}")) == []
    assert rows(theirs.shown(f"/ui/runs?parent={ours}")) == [str(strange)]


def test_text_from_outside_is_shown_as_it_is_and_never_as_markup(reader, fill, ended_run):
    nasty = schedule(fill, EVIL)
    run_id = ended_run((EVIL, "failed", EVIL, EVIL), error_code=EVIL, error_message=EVIL, schedule=nasty)
    fill("UPDATE runs SET phase = %s, error_details = to_jsonb(%s::text), input = '{\"</script>\": 1}'", EVIL, EVIL)
    fill("UPDATE schedules SET last_run_id = %s, error = %s WHERE id = %s", run_id, EVIL, nasty)
    fill(
        "INSERT INTO run_log (run_id, at, level, message, data)"
        " VALUES (%s, ecluse_now(), 'info', %s, to_jsonb(%s::text))",
        run_id,
        EVIL,
        EVIL,
    )
    addresses = ["/ui/runs", f"/ui/runs/{run_id}", "/ui/schedules", f"/ui/schedules/{nasty}"]
    addresses += ["/ui/runs?flow=%3Cscript%3E", f"/ui/runs/{run_id}?outcome=%22%3E%3Cscript%3E", "/ui/%3Cscript%3E"]
    for path in addresses:
        body = reader.get(path).body.decode()
        assert "<script>" not in body, path
        assert "<img src=x" not in body, path
        assert "</script>&quot;" not in body, path
    assert text(reader.get(f"/ui/runs/{run_id}")).count(EVIL) >= 5


@pytest.mark.parametrize("question", ["offset=-1", "offset=x", "offset=9999999", "flow=%00", "state=" + "x" * 300])
def test_a_question_that_makes_no_sense_gets_a_page_that_says_so(reader, question):
    answer = reader.get(f"/ui/runs?{question}")
    assert answer.status == 422
    assert f"Invalid parameters in the address: {question.partition('=')[0]}" in text(answer)


def test_schedules_say_in_words_when_they_are_due_and_what_became_of_it(of, fill, ended_run):
    mine = of("clock")
    run_id = ended_run(tenant="clock", status="partial", state="partial")
    nightly = schedule(fill, "nightly", last=run_id)
    for name, options in {
        "by hand": {"cron": None},
        "switched off": {"enabled": False},
        "unreadable": {"cron": "61 * * * *"},
        "workdays": {"cron": "0 9 * * 1-5", "zone": "America/New_York"},
    }.items():
        schedule(fill, name, **options)
    fill("UPDATE schedules SET tenant_id = 'clock' WHERE name = ANY(%s)",
         ["nightly", "by hand", "switched off", "unreadable", "workdays"])  # fmt: skip
    fill("UPDATE runs SET schedule_id = %s WHERE id = %s", nightly, run_id)
    fill(
        "INSERT INTO schedule_slots (schedule_id, due_at, tenant_id, state, reason, run_id, decided_at) VALUES"
        " (%(id)s, '2026-03-02 01:30Z', 'clock', 'fired', NULL, %(run)s, ecluse_now()),"
        " (%(id)s, '2026-03-01 01:30Z', 'clock', 'missed', 'no scheduler was running in time', NULL, ecluse_now())"
        .replace("%(id)s", str(nightly)).replace("%(run)s", str(run_id))
    )  # fmt: skip
    listed = mine.shown("/ui/schedules")
    assert "by hand test Manual" in listed
    assert "switched off test · disabled At 02:30 every day" in listed
    assert "0 9 * * 1-5 America/New_York" in listed
    assert "out of range" in listed.partition("unreadable")[2]
    assert f"#{run_id} partial 2026-03-02 10:00:00" in listed.partition("nightly")[2]
    rows_of = [
        len(re.findall(r"<li><time", row)) for row in mine.get("/ui/schedules").body.decode().split("</tr>")[1:6]
    ]
    assert rows_of == [0, 3, 0, 0, 3], "by name: by hand, nightly, switched off, unreadable, workdays"

    shown = mine.shown(f"/ui/schedules/{nightly}")
    assert "enabled At 02:30 every day" in shown
    ahead, _, behind = shown.partition("Slots")
    assert len(re.findall(r"\d{4}-\d\d-\d\d 0[01]:30:00 \w{3} \d{4}-\d\d-\d\d 02:30 \+0[12]00", ahead)) == 10
    assert f"2026-03-02 01:30:00 fired #{run_id} 2026-03-01 01:30:00 missed no scheduler was running in time" in behind
    assert rows(behind.partition("Latest runs")[2]) == [str(run_id)]
