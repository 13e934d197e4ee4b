"""The figures of pricing, by project: what was applied, retried and refused, the dead letters and the success rate, as
metrics and as the measures of alerts. They are computed from rows, so that every replica answers with the same ones.
Counters include executions that are under way."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_all
from ecluse.engine import Alert, Alerts, Measure, Measured, slow_lane
from ecluse.flows.connections.projects import LANE, lane_name
from ecluse.flows.pricing.states import NOT_ATTEMPTED
from ecluse.insight.samples import Metric, Sample

WINDOW = timedelta(hours=24)  # of the success rate
BURST = timedelta(minutes=5)  # of what counts as recent among refusals with 429
# In ms. The view rule_execution_counts (migration 0045) has them as well: a change needs a migration.
BUCKETS = (1_000, 5_000, 15_000, 60_000, 300_000, 900_000, 3_600_000, 14_400_000)
RATE = "Percentage of targets that were applied, of those that were sent."
COUNTED = dict.fromkeys(("applies", "retries", "throttled", "runs", "duration_ms", *map(str, BUCKETS)), 0)
KEEP = """
WITH ended AS MATERIALIZED (SELECT * FROM rule_execution_counts WHERE is_over),
counted AS (
    UPDATE rule_executions SET counted_at = ecluse_now() WHERE run_id IN (SELECT run_id FROM ended))
INSERT INTO pricing_counters (project_id, name, value)
SELECT project_id, name, sum(value) FROM ended GROUP BY project_id, name
ON CONFLICT (project_id, name) DO UPDATE SET value = pricing_counters.value + excluded.value
"""
# Of the rates, targets that were never sent are left out: they are no failures of the shop.
READ = f"""
WITH clock AS MATERIALIZED (SELECT ecluse_now() AS now),
counted AS (
    SELECT project_id, jsonb_object_agg(name, value) AS counts FROM (
        SELECT project_id, name, sum(value) AS value FROM (
            SELECT project_id, name, value FROM pricing_counters
            UNION ALL SELECT project_id, name, value FROM rule_execution_counts) every
        GROUP BY project_id, name) sums
    GROUP BY project_id),
ended AS (
    SELECT r.id, r.project_id, r.finished_at, count(*) AS sent, count(*) FILTER (WHERE t.status <> 'FAILED') AS applied
    FROM clock JOIN rule_runs r ON r.finished_at > now - %(window)s JOIN rule_targets t ON t.rule_run_id = r.id
    WHERE t.error_code IS DISTINCT FROM '{NOT_ATTEMPTED}' AND t.status IN ('APPLIED', 'ROLLED_BACK', 'FAILED')
    GROUP BY r.id),
rates AS (
    SELECT project_id, (100 * sum(applied) / sum(sent))::float8 AS of_window,
           (array_agg(100.0 * applied / sent ORDER BY finished_at DESC, id DESC))[1]::float8 AS of_last
    FROM ended GROUP BY project_id),
dead AS (
    SELECT project_id, count(*) FILTER (WHERE error_code <> '{NOT_ATTEMPTED}') AS sent,
           count(*) FILTER (WHERE error_code = '{NOT_ATTEMPTED}') AS unsent
    FROM rule_target_list WHERE status = 'FAILED' GROUP BY project_id),
refused AS (
    SELECT r.project_id, count(*) AS times, max(f.at) AS last_at
    FROM clock JOIN rule_executions x ON x.counted_at IS NULL OR x.counted_at > now - %(burst)s
    JOIN rule_runs r ON r.id = x.rule_run_id
    JOIN LATERAL (SELECT * FROM rule_refusals g WHERE g.run_id = x.run_id AND g.at > now - %(burst)s) f ON true
    GROUP BY r.project_id)
SELECT p.tenant_id AS tenant, p.id AS project, p.name, coalesce(c.counts, '{{}}') AS counts,
       s.of_window AS success_rate, s.of_last AS last_run_rate, coalesce(d.sent, 0) AS dead,
       coalesce(d.unsent, 0) AS never_sent, coalesce(f.times, 0) AS refusals,
       coalesce(l.trips > 0, false) AS lane_is_down,
       CASE WHEN l.per_second IS NOT NULL AND coalesce(l.slowed_until < f.last_at + %(burst)s, true)
           THEN f.last_at + %(burst)s - clock.now END AS slow_for,
       EXISTS (SELECT FROM rule_runs o WHERE o.project_id = p.id AND o.status = 'APPLYING') AS applying
FROM clock CROSS JOIN pricing_projects p LEFT JOIN counted c ON c.project_id = p.id
LEFT JOIN rates s ON s.project_id = p.id LEFT JOIN dead d ON d.project_id = p.id
LEFT JOIN refused f ON f.project_id = p.id LEFT JOIN lanes l ON l.name = format(%(lane)s, p.tenant_id, p.id)
WHERE p.deleted_at IS NULL AND (%(tenant)s::text IS NULL OR p.tenant_id = %(tenant)s)
  AND (%(project)s::bigint IS NULL OR p.id = %(project)s)
ORDER BY p.id
"""  # noqa: S608 - our own names

METRICS = (
    Metric("rules.apply.count", "counter", "Executions of targets.", "applies"),
    Metric("rules.apply.duration_ms", "histogram", "From the request for an apply to its end.", "runs"),
    Metric("rules.apply.success_rate", "gauge", RATE, "success_rate", {"of": "24h"}),
    Metric("rules.apply.success_rate", "gauge", RATE, "last_run_rate", {"of": "last_run"}),
    Metric("rules.dlq.size", "gauge", "Failed targets.", "dead", {"sent": "true"}),
    Metric("rules.dlq.size", "gauge", "Failed targets.", "never_sent", {"sent": "false"}),
    Metric("rules.target.retries", "counter", "Retries of targets.", "retries"),
    Metric("rules.429.count", "counter", "Calls refused with 429.", "throttled"),
)
SUCCESS_RATE = Measure(
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
BURST_ALERT = "429 Burst"


async def read(connection: Connection, tenant: str | None = None, project: int | None = None) -> list[Row]:
    """Return the figures of the projects of a tenant, or of all (None), or of one project."""
    given = {"window": WINDOW, "burst": BURST, "lane": LANE, "tenant": tenant, "project": project}
    return [{**COUNTED, **one, **one["counts"]} for one in await fetch_all(connection, dict, READ, given)]


async def keep(connection: Connection) -> None:
    """Add the executions that have ended to the counters. Called by one process at a time."""
    await connection.execute(KEEP)


def samples(figures: Sequence[Row]) -> list[Sample]:
    """Return the metrics of projects."""
    return [
        metric.sample(one, {"tenant": one["tenant"], "project": str(one["project"])}, "duration_ms", BUCKETS)
        for one in figures
        for metric in METRICS
    ]


async def measured(connection: Connection) -> Sequence[Measured]:
    """Return the measures of the projects, after the executions that have ended are added to the counters."""
    await keep(connection)
    found = []
    for one in await read(connection):
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
        await slow_lane(connection, lane, reason=BURST_ALERT, quiet=quiet)


ALERTS = Alerts(
    "project",
    measured,
    (
        Alert("Critical Success Rate", "critical", SUCCESS_RATE, 90),
        Alert("Low Success Rate", "warning", SUCCESS_RATE, 97),
        Alert("DLQ Critical", "critical", DEAD_LETTERS, 100),
        Alert("DLQ Backlog", "warning", DEAD_LETTERS, 50),
        Alert(BURST_ALERT, "warning", REFUSALS, 3, while_open=slow),
        Alert("Circuit breaker triggered", "warning", BREAKER, 0),
    ),
)
