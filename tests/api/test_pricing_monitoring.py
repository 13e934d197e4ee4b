"""Metrics and alerts of pricing over HTTP, and the metrics as Prometheus scrapes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ecluse.bootstrap.box import load_flows
from ecluse.flows.pricing.metrics import ALERTS
from ecluse.flows.pricing.surface import MetricList, PricingAlertRow
from ecluse.settings import Settings
from tests.support.api_server import add_tenant, new_key
from tests.support.metrics import scrape
from tests.support.pricing_rows import PROJECT
from tools.prometheus_rules import page

RULES = Path(__file__).resolve().parents[2] / "docs" / "prometheus-rules.yml"
ALERT = """
INSERT INTO alerts (flow, tenant_id, record_id, measure, alert, severity, summary, action, raised_at, cleared_at)
VALUES ('pricing', %s, %s, 'dead letters', 'DLQ Backlog', 'warning', '51 dead letters', 'Retry', ecluse_now(), %s)
"""
NAMES = (
    "rules.apply.count",
    "rules.apply.duration_ms",
    "rules.apply.success_rate",
    "rules.dlq.size",
    "rules.target.retries",
    "rules.429.count",
)


@pytest.mark.req("PRC-61", "PRC-62", "PRC-63", "PRC-64", "PRC-65", "PRC-66", "G-35")
def test_metrics_have_their_names_in_the_api_and_in_prometheus(api, dsn, query):
    add_tenant(dsn, "rival")
    ((mine,),), ((theirs,),) = (query(PROJECT, tenant, "Shop") for tenant in ("default", "rival"))
    answer = api.get("/api/pricing/metrics")
    MetricList.model_validate(answer.json)
    assert tuple(dict.fromkeys(one["name"] for one in answer.json["metrics"])) == NAMES
    assert {one["project_id"] for one in answer.json["metrics"]} == {str(mine)}
    assert api.get(f"/api/pricing/metrics?project_id={theirs}").json == {"metrics": []}
    assert api.get("/api/pricing/metrics?project_id=x").status == 422
    found = scrape(api)
    project = (str(mine), "default")
    assert found["ecluse_rules_apply_count_total"][project] == 0
    assert found["ecluse_rules_target_retries_total"][project] == 0
    assert found["ecluse_rules_429_count_total"][project] == 0
    projects = ((str(mine), "default"), (str(theirs), "rival"))
    sizes = {(one, sent, tenant): 0 for one, tenant in projects for sent in ("true", "false")}
    assert found["ecluse_rules_dlq_size"] == sizes
    assert found["ecluse_rules_apply_duration_ms_count"][project] == 0
    assert "ecluse_rules_apply_success_rate" not in found  # no target, no value


@pytest.mark.req("G-35")
def test_alerts_are_listed_open_or_cleared_of_the_own_tenant_only(api, dsn, query):
    add_tenant(dsn, "rival")
    ((project,),) = query(PROJECT, "default", "Shop")
    query(ALERT, "default", project, None)
    query(ALERT, "default", project, "9999-01-01T00:00:00Z")
    every = api.get("/api/pricing/alerts").json["alerts"]
    assert [PricingAlertRow.model_validate(one).cleared_at is None for one in every] == [False, True]
    assert api.get("/api/pricing/alerts?open=true").json["alerts"] == every[1:]
    assert api.get("/api/pricing/alerts?severity=critical").json["alerts"] == []
    assert api.with_key(new_key(dsn, tenant="rival")).get("/api/pricing/alerts").json["alerts"] == []


@pytest.mark.req("PRC-67", "PRC-68", "PRC-69", "PRC-70", "PRC-71")
def test_the_rules_for_prometheus_are_the_table_of_alerts():
    text = page(load_flows(Settings()))
    assert RULES.read_text() == text
    (group,) = yaml.safe_load(text)["groups"]
    assert [rule["alert"] for rule in group["rules"]] == [one.name for one in ALERTS.table]
    for rule, alert in zip(group["rules"], ALERTS.table, strict=True):
        assert rule["expr"].startswith(f"{alert.measure.expr} {'<' if alert.measure.below else '>'} {alert.limit}")
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert rule["labels"]["severity"] == alert.severity
    exprs = {rule["alert"]: rule["expr"].partition(" unless ")[2] for rule in group["rules"]}
    pairs = {name: other for name, other in exprs.items() if other}
    assert set(pairs) == {"Low Success Rate", "DLQ Backlog"}
    assert pairs["DLQ Backlog"] == f"{ALERTS.table[2].measure.expr} > 100"
