"""Metrics and alerts of pricing in the API and on the command line."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from ecluse.access.listing import Listing, Where
from ecluse.access.surface import Command, Look, Surface
from ecluse.access.wire import Shape
from ecluse.db.query import Row
from ecluse.flows.connections.project_surface import READ
from ecluse.flows.pricing import metrics
from ecluse.flows.pricing.rules import RecordId
from ecluse.flows.pricing.surface import OfProject

surface = Surface("pricing")


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


class AlertRow(Shape):
    id: str = Field(examples=["3"])
    tenant_id: str = Field(examples=["default"])
    project_id: str
    alert: str = Field(examples=["DLQ Backlog"])
    severity: Literal["warning", "critical"]
    summary: str
    action: str = Field(description="What to do.")
    raised_at: datetime
    cleared_at: datetime | None = Field(description="Null while it is open.")


class AlertFilters(OfProject):
    severity: Literal["warning", "critical"] | None = None
    open: Annotated[bool | None, Where("(t.cleared_at IS NULL) = %(open)s")] = None


ALERTS = Listing("alerts", AlertRow, "pricing_alerts", READ, filters=AlertFilters)

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
    command=Command("pricing metrics", columns=("name", "project_id", "labels", "value"), empty="no projects yet"),
)
async def show_pricing_metrics(look: Look, project_id: RecordId | None = None) -> Row:
    """Show the metrics of the tenant's projects, or of one of them."""
    project = None if project_id is None else int(project_id)
    return {"metrics": metrics.rows(await metrics.read(look.connection, look.tenant, project))}
