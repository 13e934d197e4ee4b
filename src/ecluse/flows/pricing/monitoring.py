"""Metrics and alerts of pricing in the API and on the command line."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ecluse.access.alerts import AlertFilters, AlertRow
from ecluse.access.commands import Command
from ecluse.access.listing import Listing
from ecluse.access.surface import Look, Surface
from ecluse.access.wire import Shape
from ecluse.db.query import Row
from ecluse.flows.connections.project_surface import READ
from ecluse.flows.pricing import metrics
from ecluse.flows.pricing.rules import RecordId
from ecluse.flows.pricing.surface import OfProject
from ecluse.insight.samples import Sample

surface = Surface("pricing")
COLUMNS = ("name", "type", "project_id", "labels", "value", "sum")


class MetricRow(Shape):
    name: str = Field(examples=["rules.apply.success_rate"])
    type: Literal["counter", "gauge", "histogram"]
    project_id: str
    labels: dict[str, str] = Field(examples=[{"of": "24h"}])
    value: float | None = Field(description="Null without a target; of a histogram the number of values.")
    sum: float | None = Field(None, description="Of a histogram.")
    buckets: dict[str, int] | None = Field(None, description="Of a histogram: how many values are at most so large.")


class MetricList(Shape):
    metrics: list[MetricRow]


class PricingAlertRow(AlertRow):
    project_id: str


class PricingAlertFilters(AlertFilters, OfProject):
    pass


ALERTS = Listing("alerts", PricingAlertRow, "pricing_alerts", READ, filters=PricingAlertFilters)

surface.listing(
    "/api/pricing/alerts",
    ALERTS,
    list_pricing_alerts="List the alerts of the tenant's projects, open and cleared, the newest first.",
    command=Command(
        "pricing alerts",
        columns=("id", "project_id", "severity", "alert", "summary", "raised_at", "cleared_at"),
        empty="no alerts",
    ),
)


@surface.read(
    "/api/pricing/metrics",
    needs=READ,
    answer=MetricList,
    command=Command("pricing metrics", columns=COLUMNS, empty="no projects yet"),
)
async def show_pricing_metrics(look: Look, project_id: RecordId | None = None) -> Row:
    """Show the metrics of the tenant's projects, or of one of them."""
    project = None if project_id is None else int(project_id)
    figures = await metrics.read(look.connection, look.tenant, project)
    return {"metrics": [_shown(one) for one in metrics.samples(figures)]}


def _shown(one: Sample) -> Row:
    metric, project = one.metric, one.labels["project"]
    named = {"name": metric.name, "type": metric.type, "project_id": project, "labels": metric.labels}
    return {**named, "value": one.value, "sum": one.sum, "buckets": one.buckets}
