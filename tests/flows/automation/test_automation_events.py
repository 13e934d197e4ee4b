"""What a run tells: events and their channels, log lines in known words, rows, files, and notifications."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from standardwebhooks import Webhook, WebhookVerificationError
from structlog.testing import capture_logs

from ecluse.base import trace
from ecluse.base.clock import Clock
from ecluse.bootstrap import trace_files
from ecluse.flows.automation import schedules
from ecluse.notify import endpoints
from ecluse.notify.dispatch import dispatch
from ecluse.notify.flow import working
from ecluse.notify.webhook_signature import new_secret
from ecluse.realtime.channels import channels_of
from ecluse.settings import Settings
from tests.support.automation_scenes import (
    MONDAY,
    NO_AUDITS,
    ONLY_DETAILS,
    held_up,
    known,
    log_rows,
    out_of_order,
    over,
)
from tests.support.notify_world import confirm, mail_server, new_secrets, receiving, setup_of, smtp_of
from tests.support.runs import end_run
from tests.support.transcription_world import until

TRACES = """
SELECT message, inngest_event_id, function_id, run_id FROM workflow_logs WHERE workflow = 'automation'
AND entity_type = 'automation_run' AND entity_id = %s ORDER BY created_at ASC, id
"""
COUNTERS = {
    "total_fiches": 2,
    "successful_fiches": 2,
    "failed_fiches": 0,
    "ignored_fiches": 1,
    "transcriptions_run": 3,
    "audits_run": 2,
}


def job(channels):
    return [name for name in channels if name.startswith("private-job-")]


@pytest.fixture
async def traced(automate, monkeypatch, tmp_path):
    """A run through all stages, over 1000, 1001 and 9300, which is gone, with everything that it logged and emitted."""
    monkeypatch.setenv("ECLUSE_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("AUTOMATION_DEBUG_LOG_TO_FILE", "1")
    monkeypatch.setattr(trace, "listeners", [*trace_files(Settings(), Clock())])
    world = await automate(kit={"trace_rows": True})
    await world.config()
    schedule = await world.schedule("1000", "9300")
    with capture_logs() as lines:
        async with held_up(world, "crm"), held_up(world, "elevenlabs"), held_up(world, "llm"):
            run_id = await world.trigger(schedule, fiche_ids=["1000", "1001", "9300"])
            await until(lambda: "Fiche details progress: 0/3" in world.logs(run_id))
        run = await world.ended(run_id)
        await until(lambda: any(one.get("verb") == "END:" and one.get("run_id") == run_id for one in lines))
    return world, schedule, run, lines, tmp_path


@pytest.mark.req("AUT-07", "AUT-18", "AUT-23", "AUT-26", "AUT-27", "AUT-28", "AUT-29", "AUT-30", "AUT-32", "AUT-125")
@pytest.mark.req("AUT-180", "AUT-181", "AUT-182", "AUT-183", "AUT-184", "AUT-185", "AUT-191", "G-44", "G-88")
@pytest.mark.req("AUT-186", "AUT-187", "AUT-188", "AUT-189", "AUT-190", "AUT-50", "AUT-193", "AUT-194", "AUT-57")
async def test_a_run_leaves_events_log_lines_rows_and_a_file(traced):
    world, schedule, run, lines, folder = traced
    run_id = run["id"]
    _events(world, schedule, run)
    _logs(world, run_id)
    _lines(schedule, run, lines)
    await until(lambda: ("END: completed",) in [row[:1] for row in world.query(TRACES, str(run_id))])
    rows = world.query(TRACES, str(run_id))
    assert rows[0] == ("START: run-automation", run["event_id"], "run-automation", run_id)
    assert {function for _, _, function, _ in rows} == {"run-automation"}
    fetched = dict(row[:2] for row in rows)["FAN-OUT: fiche/fetch x3"]
    assert fetched == f"automation-{run_id}-fetch-1000"
    file = folder / "automation-debug-logs" / f"automation-run-{run_id}.txt"
    written = [json.loads(line)["message"] for line in file.read_text().splitlines()]
    assert written == [row[0] for row in rows]


def _events(world, schedule, run):
    run_id, ours = run["id"], {"run_id": str(run["id"]), "schedule_id": str(schedule)}
    events = [one for one in world.events(run_id) if one[0] not in ("automation/started", "automation/selected")]
    assert [name for name, _ in events] == [
        "automation/run",
        "automation.schedule.run_created",
        "automation.run.started",
        "automation.run.selection",
        "automation/completed",
        "automation.run.completed",
    ]
    assert all(ours.items() <= payload.items() for _, payload in events)
    payloads = dict(events)
    asked = {"override_fiche_selection": {"fiche_ids": ["1000", "1001", "9300"]}, "due_at": None}
    assert asked.items() <= payloads["automation/run"].items()
    channel = f"private-job-automation-run-{run_id}"
    for name in ("started", "selection", "completed"):
        assert payloads[f"automation.run.{name}"]["job_id"] == f"automation-run-{run_id}"
        assert job(channels_of(payloads[f"automation.run.{name}"], private=True)) == [channel]
    created = payloads["automation.schedule.run_created"]
    assert job(channels_of(created, private=True)) == [f"private-job-automation-schedule-{schedule}"]
    completed = payloads["automation.run.completed"]
    assert {"status": "completed", **COUNTERS}.items() <= completed.items()
    counts = {"status": "completed", "selected": 3, "successful": 2, "failed": 0, "ignored": 1}
    assert counts.items() <= payloads["automation/completed"].items()
    assert {**run["result_summary"], **ours, "job_id": f"automation-run-{run_id}"} == completed

    progress = [live.payload for live in world.lives if live.event == "automation.run.progress"]
    assert all(job(channels_of(one, private=True)) == [channel] for one in progress)
    for phase, total in (("fetching", 3), ("transcribing", 3), ("auditing", 2)):
        mine = [one for one in progress if one["phase"] == phase]
        assert (mine[-1]["done"], mine[-1]["total"], mine[-1]["failed"]) == (total, total, 0)


def _logs(world, run_id):
    ours = [line for line in world.logs(run_id) if line[0].isupper() and not line.startswith(("FAN-OUT", "Lane "))]
    once = [
        line for n, line in enumerate(ours) if "progress: " not in line or ours[n + 1].partition(":")[0] not in line
    ]
    assert once == [
        "Processing manual fiche selection",
        "Using 3 manually selected fiches",
        "Final: 3 fiches to process",
        "Dispatched fiche/fetch fan-out events",
        "Fiche details progress: 3/3",
        "Fiche detail fetch complete (distributed)",
        "Dispatched fiche/transcribe fan-out events",
        "Transcription progress: 3/3",
        "Running 1 configs × 2 fiches = 2 total audits",  # noqa: RUF001 - as it is known
        "Dispatched audit/run fan-out events",
        "Audit progress: 2/2 (completed=2, failed=0)",
        "Automation run completed",
    ]
    ((level, data),) = log_rows(world, run_id, "Automation run completed")
    assert level == "info"
    assert {"status": "completed", **COUNTERS}.items() <= data.items()
    assert data["duration_ms"] > 0
    for message, stage in (("fiche/fetch", "fetch"), ("fiche/transcribe", "transcribe"), ("audit/run", "audit")):
        ((_, dispatched),) = log_rows(world, run_id, f"Dispatched {message} fan-out events")
        assert dispatched["event_ids"][0].startswith(f"automation-{run_id}-{stage}-1000")


def _lines(schedule, run, lines):
    mine = [one for one in lines if one.get("ids") == f"schedule-{schedule}" and "verb" in one]
    assert {one["area"] for one in mine} == {"AUTOMATION"}
    said = [f"{one['verb']} {one['event']}" for one in mine]
    milestones = [
        "START: run-automation",
        "FAN-OUT: fiche/fetch x3",
        "WAITING: fiche-details gate (polling DB for full details)",
        "DONE: fiche-details-gate",
        "FAN-OUT: fiche/transcribe x2",
        "DONE: transcription-gate",
        "FAN-OUT: audit/run x2",
        "DONE: audit-gate",
        "END: completed",
    ]
    assert [line for line in said if line in milestones] == milestones
    start = mine[0]
    assert (start["schedule_id"], start["due_at"], start["has_override"]) == (schedule, None, True)
    end = mine[-1]
    assert (end["successful"], end["failed"], end["ignored"], end["duration_ms"] > 0) == (2, 0, 1, True)
    fan_out = mine[said.index("FAN-OUT: fiche/fetch x3")]
    assert fan_out["event_ids"][0] == f"automation-{run['id']}-fetch-1000"


@pytest.mark.req("AUT-183")
async def test_each_gate_that_waits_says_what_it_waits_for(automate):
    world = await automate()
    await world.config()
    with capture_logs() as lines:
        async with held_up(world, "llm"):
            async with held_up(world, "elevenlabs"):
                run_id = await world.trigger(await world.schedule("1000"))
                await until(lambda: "Transcription progress: 0/1" in world.logs(run_id))
            await until(lambda: "Audit progress: 0/1 (completed=0, failed=0)" in world.logs(run_id))
        await world.ended(run_id)
    waiting = [one["event"] for one in lines if one.get("verb") == "WAITING:" and one["area"] == "AUTOMATION"]
    assert waiting[-2:] == [
        "transcription gate (polling DB for has_transcription)",
        "audit gate (polling DB for audit completion)",
    ]


@pytest.mark.req("AUT-25", "AUT-176", "AUT-127", "AUT-193")
async def test_no_listener_can_hold_up_a_run(automate, query, tmp_path, monkeypatch):
    """Nor is there a file where none is wanted."""
    monkeypatch.setenv("ECLUSE_DATA_DIR", str(tmp_path))
    assert trace_files(Settings(), Clock()) == []

    async def broken(_):
        raise RuntimeError("no realtime here")

    world = await automate(kit={"sinks": [broken]})
    confirm(query, "ops@example.com")
    query("ALTER TABLE deliveries RENAME TO elsewhere")
    run = await world.run_over("1000", notify_emails=["ops@example.com"], notify_on_complete=True, **ONLY_DETAILS)
    assert run["status"] == "completed"
    (line,) = [line for line in world.logs(run["id"]) if line.startswith("Notifications could not be stored: ")]
    assert "deliveries" in line
    assert query("SELECT count(*) FROM events_outbox WHERE published_seq IS NOT NULL") == [(0,)]


SECRETS = new_secrets()


@pytest.fixture
async def notifying(automate, dsn):
    """An engine that tells a receiver and a mailbox."""

    async def make(receiver, mailbox):
        return await automate(working(setup_of(dsn, SECRETS, smtp=smtp_of(mailbox))))

    return make


# How the run ended, the schedule's switches (on completion, on error), and the event that is delivered.
MATRIX = [
    ("completed", True, True, "automation/completed"),
    ("completed", False, True, None),
    ("partial", False, True, "automation/completed"),
    ("partial", True, True, "automation/completed"),
    ("failed", False, True, "automation/completed"),
    ("failed", True, False, "automation/completed"),
    ("broken", False, True, "automation/failed"),
    ("broken", True, False, None),
]
FICHES = {"completed": ["1000"], "partial": ["1000", "1001"], "failed": ["1001"], "broken": ["1002"]}


@pytest.mark.req("AUT-127", "AUT-126", "G-43")
async def test_each_recipient_is_notified_once_by_each_channel(notifying, query):
    async with receiving() as receiver, mail_server() as mailbox:
        world = await notifying(receiver, mailbox)
        world.sandbox.set_faults([{"kind": "unauthorized", "vendor": "crm", "ids": ["1001"]}])
        runs, expected = {}, {}
        confirm(query, *(f"ops{n}@example.com" for n in range(len(MATRIX))))
        async with held_up(world, "crm"):
            for n, (outcome, on_complete, on_error, event) in enumerate(MATRIX):
                schedule = await world.schedule(
                    *FICHES[outcome],
                    secrets=SECRETS,
                    webhook_url=receiver.url,
                    notify_emails=[f"ops{n}@example.com"],
                    notify_on_complete=on_complete,
                    notify_on_error=on_error,
                    **ONLY_DETAILS,
                )
                runs[n] = await world.trigger(schedule)
                if event:
                    expected[str(runs[n])] = event
            for run_id in runs.values():
                await until(lambda run_id=run_id: any("progress: 0/" in line for line in world.logs(run_id)))
            broken = [run_id for n, run_id in runs.items() if MATRIX[n][0] == "broken"]
            query("UPDATE automation_run_facts SET config_snapshot = '{}' WHERE run_id = ANY(%s)", broken)
        ended = {str(run_id): await world.ended(run_id) for run_id in runs.values()}
        await until(lambda: min(len(receiver.got), len(mailbox.taken)) >= len(expected))
        assert query("SELECT kind, count(*) FROM deliveries GROUP BY 1 ORDER BY 1") == [("mail", 6), ("webhook", 6)]
    bodies = [json.loads(one.body) for one in receiver.got]
    assert {body["data"]["run_id"]: body["type"] for body in bodies} == expected
    for body in bodies:
        run = ended[body["data"]["run_id"]]
        counts = {name: run[name] for name in ("status", "total_fiches", "successful_fiches", "failed_fiches")}
        assert counts.items() <= body["data"].items()
    mails = {mail["To"]: str(mail.get_body(("plain",)).get_content()) for mail in mailbox.taken}
    assert sorted(mails) == [f"ops{n}@example.com" for n in (0, 2, 3, 4, 5, 6)]
    for n, run_id in runs.items():
        if (text := mails.get(f"ops{n}@example.com")) is not None:
            run = ended[str(run_id)]
            facts = {"run": run_id, "status": run["status"], "failed": run["failed_fiches"]}
            assert {f"  {name}: {fact}" for name, fact in facts.items()} < set(text.splitlines())


# Whether something was selected although a day was refused, the schedule's switches, and the event that is delivered.
REFUSED_DAYS = [
    (True, False, True, "automation/completed"),
    (True, False, False, None),
    (False, False, True, "automation/failed"),
    (False, True, False, None),
]


@pytest.mark.req("AUT-127", "AUT-171", "G-43")
async def test_a_selection_that_lacks_days_notifies_recipients_of_errors(notifying, query):
    async with receiving() as receiver, mail_server() as mailbox:
        world = await notifying(receiver, mailbox)
        confirm(query, "ops@example.com")
        tuesday = MONDAY + timedelta(days=1)
        world.sandbox.set_faults(out_of_order(MONDAY, tuesday))
        await known(world, MONDAY, f1000="Paris")
        expected = {}
        for some, on_complete, on_error, event in REFUSED_DAYS:
            run = await world.run_over(
                fiche_selection=over(MONDAY if some else tuesday),
                secrets=SECRETS,
                webhook_url=receiver.url,
                notify_emails=["ops@example.com"],
                notify_on_complete=on_complete,
                notify_on_error=on_error,
                **ONLY_DETAILS,
            )
            assert run["status"] == ("completed" if some else "failed")
            if event:
                expected[str(run["id"])] = event
        await until(lambda: min(len(receiver.got), len(mailbox.taken)) >= len(expected))
    bodies = [json.loads(one.body) for one in receiver.got]
    assert {body["data"]["run_id"]: body["type"] for body in bodies} == expected
    days = {body["type"]: body["data"]["missing_days"] for body in bodies}
    assert days == {"automation/completed": ["2026-03-02"], "automation/failed": ["2026-03-03"]}
    mails = [str(mail.get_body(("plain",)).get_content()) for mail in mailbox.taken]
    assert sorted("2026-03-02" in mail for mail in mails) == [False, True]
    assert any("The selection is incomplete" in mail for mail in mails)
    assert any("No fiche was selected" in mail and "2026-03-03" in mail for mail in mails)


ENDS = """
SELECT event_type, payload ->> 'end_cause', count(*)::int FROM events_outbox
WHERE event_type IN ('transcription/failed', 'transcription.failed', 'fiche/transcribed') GROUP BY 1, 2 ORDER BY 1
"""


@pytest.mark.req("G-89", "AUT-127", "G-43")
async def test_a_run_that_an_operator_ends_alerts_once_as_cancelled_and_its_schedule_stays_silent(automate, dsn, query):
    """It has children, and its endpoints want to hear of every end."""
    async with receiving() as receiver, mail_server() as mailbox:
        notifications = working(setup_of(dsn, SECRETS, smtp=smtp_of(mailbox)))
        world = await automate(notifications, kit={"sinks": [lambda events: dispatch(world.kit.pool, events)]})
        async with world.kit.pool.connection() as connection, connection.transaction():
            hook = {"url": receiver.url, "events": ["*"]}
            number = (await endpoints.create(connection, "default", "webhook", **hook))["id"]
            await SECRETS.put(connection, "default", endpoints.secret_name(number), new_secret())
            await SECRETS.put(connection, "default", endpoints.url_name(number), receiver.url)
            failures = ["automation/failed", "transcription/failed", "transcription.failed", "fiche/transcribed"]
            await endpoints.create(connection, "default", "mail", addresses=["ops@example.com"], events=failures)
        confirm(query, "ops@example.com", "own@example.com")
        wanted = {"webhook_url": receiver.url, "notify_emails": ["own@example.com"], "notify_on_error": True}
        schedule = await world.schedule("1000", "1008", secrets=SECRETS, **wanted, **NO_AUDITS)
        children = "SELECT count(*) FROM runs WHERE parent_run_id = %s AND ended_at IS NULL"
        async with held_up(world, "elevenlabs"):
            run_id = await world.trigger(schedule)
            await until(lambda: query(children, run_id) == [(2,)])
            assert await end_run(world.kit, run_id, "wrong day", by="laptop")
            await until(lambda: query(children, run_id) == [(0,)])
        await until(lambda: query("SELECT count(*) FROM events_outbox WHERE published_seq IS NULL") == [(0,)])
        open_ = "SELECT count(*) FROM runs WHERE flow = 'notifications' AND ended_at IS NULL"
        await until(lambda: query(open_) == [(0,)])
        ends = ["fiche/transcribed", "transcription.failed", "transcription/failed"]
        assert query(ENDS) == [(name, "parent", 2) for name in ends]
    heard = [json.loads(one.body) for one in receiver.got]
    over = {one["type"]: one["data"] for one in heard if "end_cause" in one["data"]}
    assert over.keys() == {"automation/failed", "automation.run.failed"}
    counts = {"status": "failed", "state": "cancelled", "ended_by": "laptop", "error": "wrong day", "cancelled": 2}
    assert over["automation/failed"].items() >= counts.items()
    (mail,) = mailbox.taken
    assert (mail["To"], mail["Subject"]) == ("ops@example.com", f"Ecluse: automation run {run_id}: cancelled")
    text = mail.get_body(("plain",)).get_content()
    for said in ("cancelled by: “laptop”", "reason: “wrong day”", "failed: 0", "cancelled: 2"):
        assert said in text
    assert query("SELECT count(*) FROM deliveries WHERE endpoint_id IS NULL") == [(0,)], "the schedule's own"


@pytest.mark.req("AUT-127", "G-43")
async def test_a_recipient_that_cannot_be_notified_changes_nothing_about_the_run(notifying, query):
    async with receiving(500) as receiver, mail_server(at_rcpt=["550 unknown here"]) as mailbox:
        world = await notifying(receiver, mailbox)
        confirm(query, "nobody@example.com")
        run = await world.run_over(
            "1000",
            secrets=SECRETS,
            webhook_url=receiver.url,
            notify_emails=["nobody@example.com"],
            notify_on_complete=True,
            **ONLY_DETAILS,
        )
        tries = "SELECT error_code, error FROM attempts WHERE run_id IN (SELECT run_id FROM deliveries) ORDER BY 1"
        await until(lambda: any("550" in e for _, e in query(tries)) and any("500" in e for _, e in query(tries)))
        said = dict(query(tries))
        assert (run["status"], world.run(run["id"])) == ("completed", run)
    assert any("500" in error for error in said.values())
    assert any("550" in error for error in said.values())
    assert query("SELECT DISTINCT about_run FROM deliveries") == [(run["id"],)]


@pytest.mark.req("AUT-127")
async def test_a_webhook_of_a_schedule_is_signed_with_the_secret_of_that_schedule(notifying, query):
    options = {"notify_on_complete": True, **ONLY_DETAILS}
    async with receiving() as receiver, mail_server() as mailbox:
        world = await notifying(receiver, mailbox)

        async def delivered(schedule):
            before = len(receiver.got)
            await world.ended(await world.trigger(schedule))
            await until(lambda: len(receiver.got) > before)
            return receiver.got[-1]

        schedule = await world.schedule("1000", secrets=SECRETS, webhook_url=receiver.url, **options)
        async with world.kit.pool.connection() as connection:
            first = await SECRETS.get(connection, "default", f"schedule:{schedule}:webhook")
        one = await delivered(schedule)
        Webhook(first).verify(one.body, one.headers)
        async with world.kit.pool.connection() as connection:
            rotated = await schedules.rotate_secret(connection, "default", schedule, secrets=SECRETS)
        two = await delivered(schedule)
        for secret in (first, rotated["webhook_secret"]):
            Webhook(secret).verify(two.body, two.headers)
        query("UPDATE secrets SET updated_at = updated_at - interval '25 hours' WHERE name LIKE '%%:old'")
        three = await delivered(schedule)
        Webhook(rotated["webhook_secret"]).verify(three.body, three.headers)
        with pytest.raises(WebhookVerificationError):
            Webhook(first).verify(three.body, three.headers)
        query("DELETE FROM secrets WHERE name NOT LIKE '%%:url'")
        unsigned = await delivered(schedule)
    assert "webhook-signature" not in unsigned.headers, "as before there were secrets"
