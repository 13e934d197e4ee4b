"""The figures of pricing, by project: what was applied, retried and refused, the dead letters and the success rate.
They are computed from rows, so that every replica answers with the same ones. Counters include executions that are
under way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple

from ecluse.db.connect import Connection
from ecluse.db.query import fetch_all
from ecluse.flows.pricing.states import NOT_ATTEMPTED

WINDOW = timedelta(hours=24)  # of the success rate
BURST = timedelta(minutes=5)  # of what counts as recent among refusals with 429
BUCKETS = (1_000, 5_000, 15_000, 60_000, 300_000, 900_000, 3_600_000, 14_400_000)  # milliseconds

KEEP = """
UPDATE rule_executions x SET applies = f.applies, retries = f.retries, throttled = f.throttled,
    duration_ms = f.duration_ms, measured_at = ecluse_now()
FROM rule_execution_figures f WHERE f.run_id = x.run_id AND f.is_final AND x.measured_at IS NULL
"""
UP_TO = ", ".join(f"count(*) FILTER (WHERE duration_ms <= {one})" for one in BUCKETS)
# Of the rates, targets that were never sent are left out: they are no failures of the shop.
READ = f"""
WITH clock AS MATERIALIZED (SELECT ecluse_now() AS now),
counted AS (
    SELECT project_id, sum(applies)::bigint AS applies, sum(retries)::bigint AS retries,
           sum(throttled)::bigint AS throttled, count(duration_ms) AS runs, sum(duration_ms)::bigint AS duration_ms,
           ARRAY[{UP_TO}] AS up_to
    FROM rule_execution_figures GROUP BY project_id),
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
    FROM clock JOIN rule_executions x ON x.measured_at IS NULL OR x.measured_at > now - %(burst)s
    JOIN rule_runs r ON r.id = x.rule_run_id
    JOIN LATERAL (SELECT * FROM rule_refusals g WHERE g.run_id = x.run_id AND g.at > now - %(burst)s) f ON true
    GROUP BY r.project_id)
SELECT p.tenant_id AS tenant, p.id AS project, p.name, clock.now, coalesce(c.applies, 0) AS applies,
       coalesce(c.retries, 0) AS retries, coalesce(c.throttled, 0) AS throttled, coalesce(c.runs, 0) AS runs,
       coalesce(c.duration_ms, 0) AS duration_ms,
       coalesce(c.up_to, array_fill(0::bigint, ARRAY[{len(BUCKETS)}])) AS up_to,
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
    applies: int = 0  # executions of targets
    retries: int = 0
    throttled: int = 0  # calls refused with 429
    runs: int = 0  # that have ended, each round for itself
    duration_ms: int = 0  # of those together
    up_to: Sequence[int] = (0,) * len(BUCKETS)  # how many of those took at most as long as each of BUCKETS
    applied: int = 0  # targets of the runs that ended within WINDOW
    failed: int = 0
    last_applied: int = 0  # of the last of those runs
    last_failed: int = 0
    dead: int = 0  # dead letters that were sent
    never_sent: int = 0  # and those that were not
    refusals: int = 0  # calls refused with 429 within BURST
    refused_at: datetime | None = None
    applying: bool = False

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
    Metric("rules.apply.count", "counter", "Executions of targets.", [({}, lambda one: one.applies)]),
    Metric(
        "rules.apply.duration_ms", "histogram", "From the start of an apply to its end.", [({}, lambda one: one.runs)]
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
    Metric("rules.target.retries", "counter", "Retries of targets.", [({}, lambda one: one.retries)]),
    Metric("rules.429.count", "counter", "Calls refused with 429.", [({}, lambda one: one.throttled)]),
)


def percentage(applied: int, failed: int) -> float | None:
    """Return the share of applied targets in percent; None without any target."""
    return 100 * applied / (applied + failed) if applied + failed else None


async def read(connection: Connection, tenant: str | None = None, project: int | None = None) -> list[Figures]:
    """Return the figures of the projects of a tenant, or of all (None), or of one project."""
    given = {"window": WINDOW, "burst": BURST, "tenant": tenant, "project": project}
    return await fetch_all(connection, Figures, READ, given)


async def keep(connection: Connection) -> None:
    """Store the figures of executions that have ended."""
    await connection.execute(KEEP)


def rows(figures: Sequence[Figures]) -> list[dict[str, Any]]:
    """Return the metrics of projects, as they are answered."""
    found = []
    for one in figures:
        for metric in METRICS:
            for labels, value in metric.values:
                row = {"name": metric.name, "type": metric.type, "project_id": str(one.project), "labels": dict(labels)}
                found.append({**row, "value": value(one), **(_histogram(one) if metric.type == "histogram" else {})})
    return found


def _histogram(one: Figures) -> dict[str, Any]:
    return {"sum": one.duration_ms, "buckets": dict(zip(map(str, BUCKETS), one.up_to, strict=True))}
