"""Diagnostic of automation: which settings are present (never the values of secrets), how many recordings fit into the
waits, which replicas are live, and which schedules are in trouble."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from ecluse.base.text import count_of
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_all, fetch_rows
from ecluse.flows.automation.config import Config

WORST = 50
# As the tenant sees them: of a lane without an owner, the messages of the vendor are left out, since they may answer
# another tenant's calls.
LANES = """
SELECT name, max_in_flight, per_second, in_flight, waiting, paused_reason, held_until,
       CASE WHEN owner = tenant_id THEN held_reason END AS held_reason, down_since,
       CASE WHEN owner = tenant_id THEN last_failure END AS last_failure
FROM lane_list WHERE tenant_id = %s AND split_part(name, '/', 1) = ANY(%s) ORDER BY name
"""

REPLICAS = """
SELECT id, roles, started_at, extract(epoch FROM clock_timestamp() - beat_at)::float8 AS silent_seconds,
       EXISTS (SELECT FROM unnest(work) AS w WHERE w LIKE 'automation/%%') AS works_on_automation
FROM replicas WHERE state = 'live' ORDER BY id
"""
SCHEDULES = """
SELECT s.id, s.name, s.is_active, s.next_due_at, e.failures, e.error,
       s.last_run_status = 'running' AND s.last_run_at < ecluse_now() - %(longest)s - clock_stood(s.holding_run_id)
           AS is_stale,
       s.next_due_at < ecluse_now() - interval '1 minute' AS overdue, count(*) OVER () AS troubled
FROM automation_schedules s JOIN schedules e ON e.id = s.id
WHERE s.tenant_id = %(tenant)s AND s.deleted_at IS NULL AND (e.failures > 0
    OR s.next_due_at < ecluse_now() - interval '1 minute'
    OR s.last_run_status = 'running' AND s.last_run_at < ecluse_now() - %(longest)s - clock_stood(s.holding_run_id))
ORDER BY s.id LIMIT %(limit)s
"""
ACTIVE = """
SELECT count(*) FILTER (WHERE is_active)::int, count(*)::int FROM automation_schedules
WHERE tenant_id = %s AND deleted_at IS NULL
"""


@dataclass(frozen=True)
class Setup:
    """Settings of the diagnostic, from the composition root. `present` tells for each knob whether it is set; `knobs`
    has the values in force of knobs that are not secret; `unset` names the knobs without which runs fail."""

    config: Config = field(default_factory=Config)
    present: Mapping[str, bool] = field(default_factory=dict)
    knobs: Mapping[str, Any] = field(default_factory=dict)
    unset: tuple[str, ...] = ()


def budgets(config: Config) -> Row:
    """Return the time limits of a run in seconds, and the number of recordings that can be transcribed within the
    transcription wait at the configured rate, without any backoff."""
    minute = timedelta(minutes=1)
    return {
        "details_wait_seconds": config.details_wait.total_seconds(),
        "transcription_wait_seconds": config.transcription_wait.total_seconds(),
        "audit_wait_seconds": config.audit_wait.total_seconds(),
        "stale_after_seconds": config.longest.total_seconds(),
        "recordings_per_minute": config.per_minute,
        "recordings_that_fit": int(config.transcription_wait / minute * config.per_minute),
    }


async def look(connection: Connection, setup: Setup, tenant: str, lanes: Collection[str]) -> Row:
    """Return the diagnostic for a tenant: settings, budgets, lanes, replicas, the schedules in trouble (at most WORST
    of them), and hints. `lanes` names the declared lanes of automation; lanes that connections have beneath them are
    included."""
    replicas = await fetch_all(connection, dict, REPLICAS)
    given = {"tenant": tenant, "longest": setup.config.longest, "limit": WORST}
    troubled = await fetch_all(connection, dict, SCHEDULES, given)
    ((active, known),) = await fetch_rows(connection, ACTIVE, (tenant,))
    used = await fetch_all(connection, dict, LANES, (tenant, sorted(lanes)))
    count = troubled[0]["troubled"] if troubled else 0
    return {
        "settings": dict(setup.present),
        "knobs": dict(setup.knobs),
        "budgets": budgets(setup.config),
        "lanes": used,
        "replicas": replicas,
        "schedules": {
            "known": known,
            "active": active,
            "in_trouble": count,
            "worst": [{name: value for name, value in one.items() if name != "troubled"} for one in troubled],
        },
        "hints": hints(setup, used, replicas, troubled),
    }


def hints(setup: Setup, lanes: Collection[Row], replicas: Collection[Row], troubled: Collection[Row]) -> list[str]:
    """Return advice for each problem found: about settings first, then replicas, lanes and schedules."""
    found = []
    if setup.unset:
        found.append(f"Set {', '.join(setup.unset)}: runs fail until then.")
    if not setup.present.get("ECLUSE_SECRET_KEY", True):
        found.append(
            "Set ECLUSE_SECRET_KEY or ECLUSE_SECRET_KEY_FILE: without it no schedule can have an API key or a webhook."
        )
    if not setup.present.get("SMTP_HOST", True):
        found.append("Set SMTP_HOST and MAIL_FROM: without them no mail is sent to notify_emails.")
    if not any("scheduler" in replica["roles"] for replica in replicas):
        found.append("No live replica has the role scheduler: nothing is fired by the clock. Start `ecluse serve`.")
    if not any(replica["works_on_automation"] for replica in replicas):
        found.append("No live replica works on automation: runs wait. Start `ecluse serve`.")
    for lane in lanes:
        if lane["paused_reason"] is not None:
            found.append(f"Lane {lane['name']} is paused ({lane['paused_reason']}): `ecluse lanes resume` opens it.")
        elif lane["down_since"] is not None:
            since = lane["down_since"].isoformat(timespec="seconds")
            said = f": {lane['last_failure']}" if lane["last_failure"] else ""
            found.append(f"Lane {lane['name']}: vendor down since {since}{said}")
        elif lane["held_until"] is not None:
            until = lane["held_until"].isoformat(timespec="seconds")
            why = lane["held_reason"] or "as the vendor asked (Retry-After)"
            found.append(f"Lane {lane['name']} is held until {until}: {why}.")
    for one in troubled:
        about = f"Schedule {one['id']} ({one['name']})"
        if one["failures"]:
            found.append(f"{about} could not be fired {count_of(one['failures'], 'time')}: {one['error']}")
        elif one["is_stale"]:
            found.append(f"{about} has a run that takes longer than it may: it is ended as stale soon.")
        else:
            found.append(f"{about} is overdue since {one['next_due_at'].isoformat(timespec='seconds')}.")
    return found
