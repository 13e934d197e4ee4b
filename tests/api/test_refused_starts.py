"""Starts over HTTP that are refused at once, in every way to start paid work: a budget is used up, or the tenant has no
connection to the vendors. Nothing is started."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from tests.support.api_server import Client, add_connections, new_key
from tests.support.automation_rows import end_run
from tests.support.fiche_rows import call, details, save

STEPS = [{"name": "Consent", "criteria": "The customer agrees."}]
RUNS = "SELECT count(*) FROM runs WHERE tenant_id = %s"
STARTS = {
    "audit": ("/api/audits", {"fiche_id": "10", "audit_config_id": "{config}"}),
    "batch": ("/api/transcriptions/batch", {"fiche_ids": ["10", "11"]}),
    "run of a schedule": ("/api/schedules/{schedule}/run", None),
    "trigger": ("/api/automation/trigger", {"schedule_id": "{schedule}"}),
    "redrive": ("/api/runs/{run}/redrive", {"outcome": "all"}),
}


class Tenant:
    """A tenant with an audit config, a schedule, and a run of it that has failed."""

    def __init__(self, client: Client, dsn: str, name: str) -> None:
        self._dsn, self._name = dsn, name
        add_connections(dsn, name)
        self.client = client.with_key(new_key(dsn, "admin", name))
        config = self._made("/api/audit-configs", {"name": "c", "steps": STEPS})["id"]
        plan = {"name": "s", "fiche_selection": {"fiche_ids": ["10"]}}
        schedule = self._made("/api/automation/schedules", plan)["id"]
        run = self._made(f"/api/schedules/{schedule}/run", None)["run_id"]
        self._ids = {"config": config, "schedule": schedule, "run": run}
        asyncio.run(self._fill(int(run)))

    def _made(self, path, body):
        answer = self.client.post(path, body)
        assert answer.status == 201, answer.body
        return answer.json

    async def _fill(self, run: int) -> None:
        async with await psycopg.AsyncConnection.connect(self._dsn, autocommit=True) as connection:
            await save(connection, ("10", details(call("c"))), tenant=self._name)
            await end_run(connection, run, f10="failed")

    def start(self, how: str):
        path, body = STARTS[how]
        given = {k: v.format(**self._ids) if isinstance(v, str) else v for k, v in body.items()} if body else None
        return self.client.post(path.format(**self._ids), given)

    def ask(self, sql: str, *given):
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            cursor = connection.execute(sql, given)
            return cursor.fetchall() if cursor.description else []

    def runs(self) -> int:
        ((count,),) = self.ask(RUNS, self._name)
        return count


@pytest.fixture(scope="module")
def broke(shared_api, shared_dsn):
    tenant = Tenant(shared_api, shared_dsn, "broke")
    assert tenant.client.post("/api/budgets", {"amount": "0", "period": "month"}).status == 200
    return tenant


@pytest.fixture(scope="module")
def apart(shared_api, shared_dsn):
    tenant = Tenant(shared_api, shared_dsn, "apart")
    tenant.ask("DELETE FROM connections WHERE tenant_id = 'apart'")
    return tenant


@pytest.mark.parametrize("how", STARTS)
def test_a_start_that_a_budget_has_no_room_for_is_refused(broke, how):
    before, refused = broke.runs(), broke.start(how)
    assert (refused.status, refused.code) == (409, "BUDGET_EXCEEDED")
    message = refused.json["error"]["message"]
    assert message.startswith("The month's budget of tenant broke is used up: 0 of 0 spent. Nothing was started.")
    assert broke.runs() == before


# Single transcriptions and batches: tests/flows/connections/test_tenants_apart.py.
@pytest.mark.parametrize("how", [how for how in STARTS if how != "batch"])
def test_a_start_of_a_tenant_without_connections_is_refused_and_says_how_to_add_one(apart, how):
    before, refused = apart.runs(), apart.start(how)
    assert (refused.status, refused.code) == (409, "NO_CONNECTION")
    message = refused.json["error"]["message"]
    assert message.startswith("Tenant apart has no connection to ")
    assert "`ecluse connections create KIND --tenant apart" in message
    assert apart.runs() == before


def test_with_connections_and_without_a_budget_all_of_them_start(shared_api, shared_dsn):
    tenant = Tenant(shared_api, shared_dsn, "rich")
    assert {how: tenant.start(how).status // 100 for how in STARTS} == dict.fromkeys(STARTS, 2)
