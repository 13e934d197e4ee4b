"""Alerts of pricing, by project."""

from __future__ import annotations

from collections.abc import Sequence

from ecluse.db.connect import Connection
from ecluse.engine import Alert, Alerts, Measure, Measured, slow_lane
from ecluse.flows.connections.projects import lane_name
from ecluse.flows.pricing import metrics

RATE = Measure(
    "success rate",
    "success rate {value:.1f} %, less than {limit} %",
    action="Read the causes of the last runs; queue no further run of the project before they are known.",
    expr="min by (tenant, project) (ecluse_rules_apply_success_rate)",
    below=True,
)
DEAD_LETTERS = Measure(
    "dead letters",
    "{value} dead letters, more than {limit}",
    action="Read the causes (`ecluse pricing dead-letters report`), then retry the failed targets of the runs.",
    expr='max by (tenant, project) (ecluse_rules_dlq_size{sent="true"})',
)
REFUSALS = Measure(
    "refusals",
    "{value} calls refused with 429 in 5 minutes, more than {limit}",
    action="Nothing: the lane of the project runs at half its rate until 5 minutes have passed without a 429. If it "
    "comes back, set a lower rate, or find what else calls the shop with this token.",
    expr="max by (tenant, project) (increase(ecluse_rules_429_count_total[5m]))",
    until=0,
)
BREAKER = Measure(
    "breaker",
    "Circuit breaker triggered: the shop refused call after call with 429",
    action="Nothing, if it clears: the shop is called again after a minute, one call first.",
    expr='max by (lane) (ecluse_lane_down{lane=~"shop/.+"})',
)
BURST = "429 Burst"


async def measured(connection: Connection) -> Sequence[Measured]:
    """Return the measures of the projects, after the executions that have ended are added to the counters."""
    await metrics.keep(connection)
    found = []
    for one in await metrics.read(connection):
        values = {"dead letters": one["dead"], "refusals": one["refusals"], "breaker": int(one["lane_is_down"])}
        rates = [rate for rate in (one["success_rate"], one["last_run_rate"]) if rate is not None]
        # While there is no rate because failed targets of the last day are being retried, it is not known.
        if rates or not one["applying"]:
            values["success rate"] = min(rates, default=None)
        found.append(Measured(one["tenant"], str(one["project"]), one["name"], values, one))
    return found


async def slow(connection: Connection, project: Measured) -> None:
    """Halve the pace of the lane of a project, until 5 minutes after its last 429."""
    if (quiet := project.facts["slow_for"]) is not None:
        lane = lane_name(project.tenant, project.facts["project"])
        await slow_lane(connection, lane, reason=BURST, quiet=quiet)


ALERTS = Alerts(
    "project",
    measured,
    (
        Alert("Critical Success Rate", "critical", RATE, 90),
        Alert("Low Success Rate", "warning", RATE, 97),
        Alert("DLQ Critical", "critical", DEAD_LETTERS, 100),
        Alert("DLQ Backlog", "warning", DEAD_LETTERS, 50),
        Alert(BURST, "warning", REFUSALS, 3, while_open=slow),
        Alert("Circuit breaker triggered", "warning", BREAKER, 0),
    ),
)
