"""Rule runs over HTTP: preview, queue, retry, rollback, reconcile; their lists; what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import psycopg
import pytest

from ecluse.flows.pricing.run_surface import EXCLUSIONS, HISTORY, RECONCILIATIONS, RUNS, TARGETS
from ecluse.flows.pricing.shapes import DeadLetterReport, RuleRunShown, Started
from tests.support.api_server import Client, add_tenant, new_key, serving
from tests.support.waits import wait_for

ALL = "/api/pricing/runs"
TENANTS = count()
TERMS = {
    "selection": {"products": ["gid://shopify/Product/1"], "tags": ["first-50"]},
    "change": {"kind": "amount", "amount": -100},
}


@pytest.fixture(scope="module")
def open_api(shared_dsn: str) -> Iterator[Client]:
    knobs = {"PRICING_CALL_TIMEOUT_SECONDS": "1", "PRICING_REQUESTS_PER_SECOND": "1000"}
    roles = frozenset({"api", "worker"})
    with serving(shared_dsn, roles=roles, ECLUSE_ALLOWED_NETWORKS="127.0.0.0/8", **knobs) as client:
        yield client


@pytest.fixture
def client(open_api: Client, shared_dsn: str) -> Client:
    """With an operator's key of a tenant of its own."""
    add_tenant(shared_dsn, name := f"pricing-{next(TENANTS)}")
    return open_api.with_key(new_key(shared_dsn, tenant=name))


@pytest.fixture
def rule(client: Client, sandbox: Any) -> str:
    shop = {"name": "Shop", "connector": "shopify", "base_url": f"{sandbox.url}/shopify/unlimited", "currency": "EUR"}
    project = client.post("/api/pricing/projects", {**shop, "access_token": "shpat_x"}).json["id"]
    return str(client.post("/api/pricing/rules", {"name": "Sale", "project_id": project, **TERMS}).json["id"])


def over(client: Client, started: Any) -> Any:
    """The rule run after the execution that was started."""
    assert started.status in (200, 201), started.json
    run = Started.model_validate(started.json)
    wait_for(lambda: client.get(f"/api/runs/{run.run_id}").json["ended_at"])
    return client.get(f"{ALL}/{run.id}").json


@pytest.fixture
def run(client: Client, rule: str) -> Any:
    return over(client, client.post(ALL, {"rule_id": rule}))


@pytest.mark.req("PRC-77", "PRC-03", "PRC-73", "G-35")
def test_a_rule_is_previewed_queued_reconciled_and_rolled_back(client, run):
    assert RuleRunShown.model_validate(run).rule["selection"]["products"] == TERMS["selection"]["products"]
    [listed] = RUNS.page.model_validate(client.get(ALL).json).runs
    assert (listed.id, listed.rule_id) == (run["id"], run["rule_id"])
    path = f"{ALL}/{run['id']}"
    assert (run["status"], run["counts"], run["source"]) == ("PREVIEW", {"PREVIEW": 10}, "api")
    assert client.post(f"{path}/queue", {"plan_hash": "0" * 64}).code == "CONFLICT"
    applied = over(client, client.post(f"{path}/queue", {"plan_hash": run["plan_hash"], "canary": 3}))
    assert (applied["status"], applied["counts"], applied["canary"]) == ("APPLIED", {"APPLIED": 10}, 3)
    again = client.post(f"{path}/queue", {"plan_hash": run["plan_hash"]})
    assert (again.status, again.code) == (409, "FORBIDDEN_TRANSITION")
    assert client.post(f"{path}/retry", {}).code == "FORBIDDEN_TRANSITION"
    over(client, client.post(f"{path}/reconcile"))
    assert client.post(f"{path}/correct").code == "CONFLICT"
    back = over(client, client.post(f"{path}/rollback", {}))
    assert back["status"] == "ROLLED_BACK"
    for listing, part, rows in ((TARGETS, "targets?status=ROLLED_BACK", 10), (EXCLUSIONS, "exclusions", 0)):
        page = listing.page.model_validate(client.get(f"{path}/{part}").json)
        assert len(getattr(page, listing.name)) == rows
    HISTORY.page.model_validate(client.get(f"{path}/history?limit=5").json)
    [on_demand] = RECONCILIATIONS.page.model_validate(client.get(f"{path}/reconciliations").json).reconciliations
    assert (on_demand.kind, on_demand.checked) == ("on_demand", 10)
    assert client.get(f"{path}/mismatches").json["mismatches"] == []
    [listed] = RUNS.page.model_validate(client.get(f"{ALL}?status=ROLLED_BACK").json).runs
    assert listed.id == run["id"]


def test_a_run_says_what_its_open_execution_waits_for(client, run):
    path = f"{ALL}/{run['id']}"
    (lane,) = [one["name"] for one in client.get("/api/lanes").json["lanes"] if one["name"].startswith("shop/")]
    assert client.post(f"/api/lanes/{lane}/pause", {"reason": "sale of the year"}).status == 200
    started = client.post(f"{path}/queue", {"plan_hash": run["plan_hash"]})
    why = f"lane {lane} was paused by an operator: sale of the year"
    wait_for(lambda: why in (client.get(path).json["waiting"] or ""))
    assert client.post(f"/api/lanes/{lane}/resume", {"reason": "it is over"}).status == 200
    assert over(client, started)["waiting"] is None


@pytest.mark.req("PRC-46", "PRC-47", "PRC-50")
def test_the_dead_letters_are_listed_reported_and_retried(client, sandbox, run):
    sandbox.set_faults([{"vendor": "shopify", "ids": ["gid://shopify/Product/1"], "kind": "refused", "code": "x"}])
    path = f"{ALL}/{run['id']}"
    failed = over(client, client.post(f"{path}/queue", {"plan_hash": run["plan_hash"]}))
    assert (failed["status"], sum(failed["errors"].values())) == ("FAILED", 10)
    letters = client.get(f"/api/pricing/dead-letters?project_id={run['project_id']}").json["targets"]
    assert {one["status"] for one in letters} == {"FAILED"}
    report = DeadLetterReport.model_validate(client.get(f"/api/pricing/projects/{run['project_id']}/dead-letters").json)
    assert (report.total, report.not_attempted, len(report.causes)) == (10, 0, 1)
    assert client.post(f"{path}/rollback", {}).code == "FORBIDDEN_TRANSITION"
    stranger = client.post(f"{path}/retry", {"target_ids": [letters[0]["id"], "999999999"]})
    assert (stranger.status, client.get(path).json["status"]) == (404, "FAILED")
    sandbox.set_faults([])
    partly = over(client, client.post(f"{path}/retry", {"target_ids": [letters[0]["id"]]}))
    assert (partly["status"], partly["counts"]) == ("PARTIAL", {"APPLIED": 1, "FAILED": 9})
    assert client.post(f"{path}/retry", {"target_ids": [letters[0]["id"]]}).code == "FORBIDDEN_TRANSITION"


def test_runs_of_another_tenant_are_not_found(open_api, shared_dsn, run, rule):
    add_tenant(shared_dsn, "another")
    other, path = open_api.with_key(new_key(shared_dsn, tenant="another")), f"{ALL}/{run['id']}"
    assert other.post(ALL, {"rule_id": rule}).status == 404
    for part in ("", "/targets", "/exclusions", "/history", "/reconciliations", "/mismatches"):
        assert other.get(path + part).status == 404, part
    for part, body in (
        ("queue", {"plan_hash": run["plan_hash"]}),
        ("retry", {}),
        ("rollback", {}),
        ("reconcile", None),
    ):
        assert other.post(f"{path}/{part}", body).status == 404, part
    assert other.get(f"/api/pricing/projects/{run['project_id']}/dead-letters").status == 404
    assert other.get(ALL).json["runs"] == []


@pytest.mark.parametrize(
    ("part", "body"),
    [
        ("queue", {"plan_hash": "x"}),
        ("queue", {"plan_hash": "0" * 64, "target_ids": []}),
        ("queue", {"plan_hash": "0" * 64, "canary": 0}),
        ("queue", {"plan_hash": "0" * 64, "max_failure_rate": 1.5}),
        ("rollback", {"forced": "yes"}),
        ("retry", {"target_ids": ["x"]}),
    ],
)
def test_what_makes_no_sense_is_refused(client, run, part, body):
    answer = client.post(f"{ALL}/{run['id']}/{part}", body)
    assert (answer.status, answer.code) == (422, "INVALID_INPUT")
    assert client.get(f"{ALL}/{run['id']}").json["status"] == "PREVIEW"


def test_a_tenant_that_is_disabled_with_stop_has_no_price_changed_any_more(open_api, shared_dsn, client, rule, sandbox):
    """Half of the products are applied; the shop has asked to wait with the others."""
    ids = [f"gid://shopify/Product/{n}" for n in range(1, 5)]
    changed = client.ask("PATCH", f"/api/pricing/rules/{rule}", {"selection": {"products": ids, "tags": ["first-50"]}})
    assert changed.status == 200, changed
    run = over(client, client.post(ALL, {"rule_id": rule}))
    waits = {"vendor": "shopify", "kind": "throttle", "retry_after": 300, "ids": ids[2:]}
    sandbox.set_faults([waits])
    applying = client.post(f"{ALL}/{run['id']}/queue", {"plan_hash": run["plan_hash"]})
    counts = wait_for(lambda: (found := client.get(f"{ALL}/{run['id']}").json["counts"]).get("APPLIED") == 20 and found)
    assert sum(counts.values()) == 40
    tenant = client.get("/api/me").json["tenant_id"]
    admin = open_api.with_key(new_key(shared_dsn, "admin"))
    assert admin.get(f"/api/tenants/{tenant}/disable").json["open_runs"] == 1
    answer = admin.post(f"/api/tenants/{tenant}/disable", {"reason": "unpaid", "stop": True})
    assert (answer.status, answer.json["ended_runs"], answer.json["open_runs"]) == (200, 1, 0)
    written = len(sandbox.ledger(vendor="shopify", kind="effect"))
    sandbox.set_faults([])
    with psycopg.connect(shared_dsn, autocommit=True) as connection:

        def ask(sql: str, *given: Any) -> list[Any]:
            return connection.execute(sql, given).fetchall()  # type: ignore[arg-type]

        engine_run = applying.json["run_id"]
        assert ask("SELECT state, end_cause FROM runs WHERE id = %s", engine_run) == [("cancelled", "operator")]
        assert ask("SELECT status FROM rule_runs WHERE id = %s", run["id"]) == [("PARTIAL",)]
        targets = "SELECT status, count(*) FROM rule_targets WHERE rule_run_id = %s GROUP BY 1 ORDER BY 1"
        assert ask(targets, run["id"]) == [("APPLIED", 20), ("FAILED", 20)]
        assert ask("SELECT count(*) FROM items WHERE run_id = %s AND status = 'open'", engine_run) == [(0,)]
        held = "SELECT coalesce(sum(in_flight), 0) FROM claims WHERE run_id = %s"
        wait_for(lambda: ask(held, engine_run) == [(0,)])
    assert len(sandbox.ledger(vendor="shopify", kind="effect")) == written
