"""Pricing rules, metrics and alerts in the API and on the command line; and the end of a project, which takes its rules
with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from ecluse.access import secrets as sealed
from ecluse.access.alerts import AlertFilters, AlertRow
from ecluse.access.commands import Command
from ecluse.access.listing import Listing, equal
from ecluse.access.records import RecordRow
from ecluse.access.resource import Resource
from ecluse.access.surface import Act, Look, Noun, Surface
from ecluse.access.wire import Body, Shape
from ecluse.base.validation import fields_of, partial_of
from ecluse.db.query import Row
from ecluse.flows.connections import project_surface, projects
from ecluse.flows.connections.project_surface import READ, Name, ProjectNumber
from ecluse.flows.pricing import metrics, runs
from ecluse.flows.pricing.rules import RecordId, Terms, VariantSelection
from ecluse.insight.samples import Sample

surface = Surface("pricing")
METRIC_COLUMNS = ("name", "type", "project_id", "labels", "value", "sum")
PROJECT = replace(project_surface.PROJECT, surface=surface)


class NewRule(Terms):
    project_id: RecordId
    name: Name = Field(examples=["Summer sale"])


@partial_of(Terms)
class ChangedRule(Body):
    """Changes to a rule: fields that are left out stay as they are; null removes ending, floor and cap."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"ending": "99", "cap": 9900}]})

    name: Name | None = None


@fields_of(Terms, without=("selection",))
class RuleFacts(RecordRow):
    project_id: str
    version: int


@fields_of(VariantSelection, without=("products",))
class ListedVariants(Shape):
    products_given: int = Field(description="How many products are named; a single rule has their ids.")


class RuleRow(RuleFacts):
    selection: ListedVariants


@fields_of(Terms)
class RuleInFull(RuleFacts):
    """A rule with what it selects."""


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


RULE = Resource(surface, "/api/pricing/rules/{rule_id}", "pricing", "pricing_rule", "pricing rules", RuleInFull)
# Products, up to a thousand per rule, are counted.
LISTED = """(
    SELECT id, tenant_id, name, created_by, created_at, updated_by, updated_at, deleted_at, project_id, version, change,
           ending, floor, cap, allow_free, selection - 'products'
               || jsonb_build_object('products_given', jsonb_array_length(selection -> 'products')) AS selection
    FROM pricing_rules)"""
OF_PROJECT, KEPT = equal(project_id=RecordId), "t.deleted_at IS NULL"
RULES = Listing("rules", RuleRow, LISTED, READ, filters=OF_PROJECT, order=("id",), where=KEPT)
RuleNumber = Annotated[int, Noun("pricing rule")]

RULE.lists(
    RULES,
    list_rules="List the pricing rules of the tenant, by id, with the number of products that each names.",
    columns=("id", "project_id", "version", "name", "ending", "floor", "cap"),
    empty="no rules yet: `ecluse pricing rules create`",
)


@PROJECT.deletes(refuses=["CONFLICT"])
async def delete_project(act: Act, project_id: ProjectNumber) -> Row:
    """Delete a project with its rules and its access token. Its past runs stay."""
    await projects.delete(act.connection, act.tenant, project_id, act.caller.name)
    await runs.delete_rules(act.connection, project_id, act.caller.name)
    await sealed.delete(act.connection, act.tenant, projects.secret_name(project_id))
    return {"id": str(project_id), "deleted": True}


@RULE.creates(refuses=["NAME_TAKEN", "LIMIT_REACHED"], arguments=("project_id", "name"))
async def create_rule(act: Act, body: NewRule) -> Row:
    """Create a rule of a project. It changes no price until a run of it is queued."""
    await act.require_room("pricing_rules")
    return await runs.create_rule(act.connection, act.tenant, int(body.project_id), body.name, body, act.caller.name)


@RULE.shows()
async def show_rule(look: Look, rule_id: RuleNumber) -> Row:
    """Show one rule."""
    return await runs.RULES.show(look.connection, look.tenant, rule_id)


@RULE.changes(refuses=["NAME_TAKEN"])
async def change_rule(act: Act, rule_id: RuleNumber, body: ChangedRule) -> Row:
    """Change a rule. What it decides by makes a new version; runs keep the version of their plan."""
    given = body.changes("ending", "floor", "cap")
    return await runs.change_rule(act.connection, act.tenant, rule_id, given, act.caller.name)


@RULE.deletes()
async def delete_rule(act: Act, rule_id: RuleNumber) -> Row:
    """Delete a rule. Its past runs stay."""
    await runs.RULES.delete(act.connection, act.tenant, rule_id, act.caller.name)
    return {"id": str(rule_id), "deleted": True}


ALERTS = Listing("alerts", PricingAlertRow, "pricing_alerts", READ, filters=equal(AlertFilters, OF_PROJECT))
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
    command=Command("pricing metrics", columns=METRIC_COLUMNS, empty="no projects yet"),
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
