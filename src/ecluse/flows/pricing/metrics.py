"""The figures of pricing, by project: what was applied, retried and refused, the dead letters and the success rate.
They are computed from rows, so that every replica answers with the same ones. Counters include executions that are
under way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple

from ecluse.db.connect import Connection
from ecluse.db.query import fetch_all
from ecluse.flows.pricing.states import NOT_ATTEMPTED

WINDOW = timedelta(hours=24)  # of the success rate
BURST = timedelta(minutes=5)  # of what counts as recent among refusals with 429
BUCKETS = (1_000, 5_000, 15_000, 60_000, 300_000, 900_000, 3_600_000, 14_400_000)  # milliseconds

UP_TO = ", ".join(f"('{one}', (took.ms <= {one})::int)" for one in BUCKETS)
# Of executions that are not in the counters yet. A duration is counted by its buckets.
LIVE = f"""
SELECT x.run_id, r.project_id, e.id IS NULL OR e.ended_at IS NOT NULL AS is_over, c.name, coalesce(c.value, 0) AS value
FROM rule_executions x JOIN rule_runs r ON r.id = x.rule_run_id LEFT JOIN runs e ON e.id = x.run_id
CROSS JOIN LATERAL (SELECT sum(i.executions) AS applies, sum(greatest(i.executions - 1, 0)) AS retries
                    FROM items i WHERE i.run_id = x.run_id AND x.kind = 'apply') sent
CROSS JOIN LATERAL (SELECT CASE x.kind WHEN 'apply' THEN floor(extract(epoch FROM e.ended_at - e.created_at) * 1000)
                                END::bigint AS ms) took
CROSS JOIN LATERAL (VALUES ('applies', sent.applies), ('retries', sent.retries),
    ('throttled', (SELECT count(*) FROM rule_refusals f WHERE f.run_id = x.run_id)),
    ('runs', (took.ms IS NOT NULL)::int), ('duration_ms', took.ms), {UP_TO}) c(name, value)
WHERE x.counted_at IS NULL
"""  # noqa: S608 - our own names
KEEP = f"""
WITH live AS MATERIALIZED ({LIVE}),
counted AS (
    UPDATE rule_executions x SET counted_at = ecluse_now()
    FROM (SELECT DISTINCT run_id FROM live WHERE is_over) AS o WHERE x.run_id = o.run_id)
INSERT INTO pricing_counters (project_id, name, value)
SELECT project_id, name, sum(value) FROM live WHERE is_over GROUP BY project_id, name
ON CONFLICT (project_id, name) DO UPDATE SET value = pricing_counters.value + excluded.value
"""  # noqa: S608 - our own names
# Of the rates, targets that were never sent are left out: they are no failures of the shop.
READ = f"""
WITH clock AS MATERIALIZED (SELECT ecluse_now() AS now),
counted AS (
    SELECT project_id, jsonb_object_agg(name, value) AS counts FROM (
        SELECT project_id, name, sum(value) AS value FROM (
            SELECT project_id, name, value FROM pricing_counters
            UNION ALL SELECT project_id, name, value FROM ({LIVE}) live) every
        GROUP BY project_id, name) sums
    GROUP BY project_id),
ended AS (
    SELECT r.id, r.project_id, r.finished_at, count(*) FILTER (WHERE t.status IN ('APPLIED', 'ROLLED_BACK')) AS applied,
           count(*) FILTER (WHERE t.status = 'FAILED') AS failed
    FROM clock JOIN rule_runs r ON r.finished_at > now - %(window)s JOIN rule_targets t ON t.rule_run_id = r.id
    WHERE t.error_code IS DISTINCT FROM '{NOT_ATTEMPTED}' AND t.status IN ('APPLIED', 'ROLLED_BACK', 'FAILED')
    GROUP BY r.id),
rates AS (
    SELECT project_id, sum(applied)::bigint AS applied, sum(failed)::bigint AS failed,
           (array_agg(applied ORDER BY finished_at DESC, id DESC))[1] AS last_applied,
           (array_agg(failed ORDER BY finished_at DESC, id DESC))[1] AS last_failed
    FROM ended GROUP BY project_id),
dead AS (
    SELECT r.project_id, count(*) FILTER (WHERE t.error_code <> '{NOT_ATTEMPTED}') AS sent,
           count(*) FILTER (WHERE t.error_code = '{NOT_ATTEMPTED}') AS unsent
    FROM rule_targets t JOIN rule_runs r ON r.id = t.rule_run_id WHERE t.status = 'FAILED' GROUP BY r.project_id),
refused AS (
    SELECT r.project_id, count(*) AS times, max(f.at) AS last_at
    FROM clock JOIN rule_executions x ON x.counted_at IS NULL OR x.counted_at > now - %(burst)s
    JOIN rule_runs r ON r.id = x.rule_run_id
    JOIN LATERAL (SELECT * FROM rule_refusals g WHERE g.run_id = x.run_id AND g.at > now - %(burst)s) f ON true
    GROUP BY r.project_id)
SELECT p.tenant_id AS tenant, p.id AS project, p.name, clock.now, coalesce(c.counts, '{{}}') AS counts,
       coalesce(s.applied, 0) AS applied, coalesce(s.failed, 0) AS failed,
       coalesce(s.last_applied, 0) AS last_applied, coalesce(s.last_failed, 0) AS last_failed,
       coalesce(d.sent, 0) AS dead, coalesce(d.unsent, 0) AS never_sent,
       coalesce(f.times, 0) AS refusals, f.last_at AS refused_at,
       EXISTS (SELECT FROM rule_runs o WHERE o.project_id = p.id AND o.status = 'APPLYING') AS applying
FROM clock CROSS JOIN pricing_projects p LEFT JOIN counted c ON c.project_id = p.id
LEFT JOIN rates s ON s.project_id = p.id LEFT JOIN dead d ON d.project_id = p.id
LEFT JOIN refused f ON f.project_id = p.id
WHERE p.deleted_at IS NULL AND (%(tenant)s::text IS NULL OR p.tenant_id = %(tenant)s)
  AND (%(project)s::bigint IS NULL OR p.id = %(project)s)
ORDER BY p.id
"""  # noqa: S608 - our own names


@dataclass(frozen=True)
class Figures:
    """What is known of a project at the instant `now`."""

    tenant: str
    project: int
    name: str
    now: datetime
    counts: Mapping[str, int] = field(default_factory=dict)  # by the names in LIVE
    applied: int = 0  # targets of the runs that ended within WINDOW
    failed: int = 0
    last_applied: int = 0  # of the last of those runs
    last_failed: int = 0
    dead: int = 0  # dead letters that were sent
    never_sent: int = 0  # and those that were not
    refusals: int = 0  # calls refused with 429 within BURST
    refused_at: datetime | None = None
    applying: bool = False

    def count(self, name: str) -> int:
        return self.counts.get(name, 0)

    @property
    def up_to(self) -> Mapping[str, int]:
        """How many durations were at most as long as each of BUCKETS."""
        return {str(one): self.count(str(one)) for one in BUCKETS}

    @property
    def success_rate(self) -> float | None:
        return percentage(self.applied, self.failed)

    @property
    def last_run_rate(self) -> float | None:
        return percentage(self.last_applied, self.last_failed)


class Metric(NamedTuple):
    """A figure under its name; `name` with underscores, after `ecluse_`, is its name in Prometheus."""

    name: str
    type: Literal["counter", "gauge", "histogram"]
    meaning: str
    values: Sequence[tuple[Mapping[str, str], Figure]]  # by further labels


Figure = Callable[[Figures], float | None]
METRICS = (
    Metric("rules.apply.count", "counter", "Executions of targets.", [({}, lambda one: one.count("applies"))]),
    Metric(
        "rules.apply.duration_ms",
        "histogram",
        "From the start of an apply to its end.",
        [({}, lambda one: one.count("runs"))],
    ),
    Metric(
        "rules.apply.success_rate",
        "gauge",
        "Percentage of targets that were applied, of those that were sent.",
        [({"of": "24h"}, lambda one: one.success_rate), ({"of": "last_run"}, lambda one: one.last_run_rate)],
    ),
    Metric(
        "rules.dlq.size",
        "gauge",
        "Failed targets.",
        [({"sent": "true"}, lambda one: one.dead), ({"sent": "false"}, lambda one: one.never_sent)],
    ),
    Metric("rules.target.retries", "counter", "Retries of targets.", [({}, lambda one: one.count("retries"))]),
    Metric("rules.429.count", "counter", "Calls refused with 429.", [({}, lambda one: one.count("throttled"))]),
)


def percentage(applied: int, failed: int) -> float | None:
    """Return the share of applied targets in percent; None without any target."""
    return 100 * applied / (applied + failed) if applied + failed else None


async def read(connection: Connection, tenant: str | None = None, project: int | None = None) -> list[Figures]:
    """Return the figures of the projects of a tenant, or of all (None), or of one project."""
    given = {"window": WINDOW, "burst": BURST, "tenant": tenant, "project": project}
    return await fetch_all(connection, Figures, READ, given)


async def keep(connection: Connection) -> None:
    """Add the executions that have ended to the counters. Called by one process at a time."""
    await connection.execute(KEEP)


def rows(figures: Sequence[Figures]) -> list[dict[str, Any]]:
    """Return the metrics of projects, as they are answered."""
    found = []
    for one in figures:
        for metric in METRICS:
            for labels, value in metric.values:
                row = {"name": metric.name, "type": metric.type, "project_id": str(one.project), "labels": dict(labels)}
                histogram = {"sum": one.count("duration_ms"), "buckets": one.up_to}
                found.append({**row, "value": value(one), **(histogram if metric.type == "histogram" else {})})
    return found
