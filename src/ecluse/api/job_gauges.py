"""The gauges of jobs, from the database."""

from __future__ import annotations

from ecluse.flow import Gauge

GAUGES = (
    Gauge(
        "jobs_pending",
        "Jobs with an attempt that waits for an agent, due or not yet.",
        "SELECT ARRAY[tenant_id], count(*) FROM job_runs WHERE status = 'pending' GROUP BY tenant_id",
        ("tenant",),
    ),
    Gauge(
        "jobs_running",
        "Jobs that an agent executes.",
        "SELECT ARRAY[tenant_id], count(*) FROM job_runs WHERE status = 'running' GROUP BY tenant_id",
        ("tenant",),
    ),
    Gauge(
        "jobs_oldest_pending_seconds",
        "How long the oldest job that is due has waited for an agent; 0 without any.",
        "SELECT '{}'::text[], coalesce(greatest(extract(epoch FROM ecluse_now() - min(due_at)), 0), 0)::float8"
        " FROM job_runs WHERE status = 'pending'",
    ),
    Gauge(
        "agents_online",
        "Agents that sent a request within the last minute.",
        "SELECT ARRAY[tenant_id], count(*) FROM job_agent_list WHERE online GROUP BY tenant_id",
        ("tenant",),
    ),
)
