"""Whatever a person starts is in the audit trail: once, with the key that started it and what was started."""

from __future__ import annotations

import asyncio
import csv
import threading
import time
from pathlib import Path

import psycopg
import pytest

from tests.support.api_server import FLOW, new_key, serving
from tests.support.automation_rows import end_run
from tests.support.fiche_rows import call, details, save
from tests.support.job_world import JobWorld
from tests.support.registers import SNCF

STEPS = [{"name": "Consent", "criteria": "The customer agrees.", "weight": 2, "max_score": 5}]
CONFIG = {"name": "Consent", "system_prompt": "Check.", "steps": STEPS}
SHOP = {"name": "Shop", "connector": "shopify", "currency": "EUR", "access_token": "shpat_x"}
RULE = {"selection": {"tags": ["sale"]}, "change": {"kind": "amount", "amount": -100}}


def on(dsn, do, *arguments, **options):
    async def act():
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            return await do(connection, *arguments, **options)

    return asyncio.run(act())


@pytest.fixture
def served(dsn, sandbox):
    with serving(dsn, FLOW, ECLUSE_ALLOWED_NETWORKS="127.0.0.0/8") as client:
        yield client.with_key(new_key(dsn))


def test_each_kind_of_start_is_recorded_with_the_key_and_what_was_started(served, dsn, sandbox, query, tmp_path: Path):
    def made(path, body=None):
        answer = served.post(path, body)
        assert answer.status in (200, 201, 202), (path, answer.status, answer.body)
        return answer.json

    on(dsn, save, ("10", details(call("c"))))
    jobs = JobWorld(served, tmp_path)
    job_schedule = jobs.schedule(jobs.host())
    config = made("/api/audit-configs", CONFIG)["id"]
    schedule = made("/api/automation/schedules", {"name": "s", "fiche_selection": {"fiche_ids": ["1"]}})["id"]
    project = made("/api/pricing/projects", {**SHOP, "base_url": f"{sandbox.url}/shopify/unlimited"})["id"]
    rule = made("/api/pricing/rules", {"name": "Sale", "project_id": project, **RULE})["id"]
    last = query("SELECT max(id) FROM audit_trail")[0][0]

    started = [("run.start", f"run:{made('/api/runs', {'flow': 'test'})['run_id']}")]
    started.append(("transcription.start", f"run:{made('/api/transcriptions/10')['run_id']}"))
    made("/api/transcriptions/batch", {"fiche_ids": ["11", "12"]})
    started.append(("transcription.start", "fiches:2"))
    started.append(
        ("audit.start", f"run:{made('/api/audits', {'fiche_id': '10', 'audit_config_id': config})['run_id']}")
    )
    run = made(f"/api/schedules/{schedule}/run")["run_id"]
    started.append(("schedule.run", f"schedule:{schedule}"))
    on(dsn, end_run, int(run), f1="failed/BUSY")
    made(f"/api/runs/{run}/redrive")
    started.append(("run.redrive", f"run:{run}"))
    made("/api/automation/trigger", {"scheduleId": schedule})
    started.append(("automation_schedule.trigger", f"schedule:{schedule}"))
    started.append(("rule_run.preview", f"rule_run:{made('/api/pricing/runs', {'rule_id': rule})['id']}"))
    job = jobs.run(job_schedule)
    started.append(("job_schedule.run", f"job_schedule:{job_schedule}"))
    made(f"/api/jobs/{job}/cancel", {})
    made(f"/api/jobs/{job}/retry", {})
    started += [("job.cancel", f"job:{job}"), ("job.retry", f"job:{job}")]
    request = made("/v1/requests", {"company_siren": SNCF})["id"]
    made(f"/v1/requests/{request}:refresh-company")
    started += [("request.create", f"request:{request}"), ("request.refresh", f"request:{request}")]

    me = served.get("/api/me").json["key_id"]
    rows = query("SELECT action, subject, actor, address FROM audit_trail WHERE id > %s ORDER BY id", last)
    assert [row[:2] for row in rows] == started
    assert {row[2:] for row in rows} == {(f"key:{me}", "127.0.0.1")}


@pytest.mark.alone
@pytest.mark.parametrize("form", ["csv", "ndjson"])
def test_a_long_trail_is_exported_without_holding_up_other_requests(served, dsn, query, form):
    query(
        "INSERT INTO audit_trail (tenant_id, at, actor, action, subject, reason)"
        " SELECT 'default', now(), 'cli:ann', 'x.y', 'n:' || n, repeat('=1;@2 ', 60) FROM generate_series(1, 50000) n"
    )
    admin, waits, found = served.with_key(new_key(dsn, "admin")), [], []
    served.get("/api/me")
    exporting = threading.Thread(
        target=lambda: found.append(admin.get(f"/api/audit-trail/export?action=x.y&format={form}"))
    )
    exporting.start()
    while exporting.is_alive():
        began = time.monotonic()
        assert served.get("/healthz").status == 200
        waits.append(time.monotonic() - began)
        time.sleep(0.005)
    exporting.join()
    assert found[0].headers["X-Content-Type-Options"] == "nosniff"
    lines = found[0].body.decode().splitlines()
    assert len(lines) == 50_000 + (form == "csv")
    if form == "csv":
        assert next(csv.DictReader(lines))["reason"].startswith("'=1;'@2 ")
    waits.sort()
    print(f"{len(waits)} requests, longest {waits[-1]:.3f} s, median {waits[len(waits) // 2]:.3f} s")  # pytest -rP
    assert waits[-1] < 0.5
