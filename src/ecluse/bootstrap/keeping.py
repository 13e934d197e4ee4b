"""The rules of retention, derived from the settings."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from ecluse.engine import Flow
from ecluse.notify.rules import FLOW_NAME as NOTIFICATIONS
from ecluse.retention.kinds import ATTEMPTS, EVENTS, LEASES, LOGS, SLOTS, SPEND, Aged
from ecluse.retention.sweep import OldRuns, Rule
from ecluse.retention.workflows import WORKFLOWS
from ecluse.settings import Settings

# Idempotency keys are valid for a day, requests are counted by the minute, and secrets are those of deleted schedules:
# older rows have no meaning.
FIXED = timedelta(days=1)


def retention_rules(settings: Settings, flows: Sequence[Flow]) -> list[Rule]:
    """Return the rules of retention, in the order of deletion: rows with an age of their own, then runs with their
    remaining rows, then audits and fiches, which runs refer to."""
    from ecluse.access import audit_trail, idempotency
    from ecluse.flows.audits import store as audits
    from ecluse.flows.automation import schedules
    from ecluse.flows.fiches import cache as fiches
    from ecluse.flows.jobs import schedules as jobs
    from ecluse.flows.pricing import runs as rule_runs
    from ecluse.flows.transcriptions import start, store

    deliveries = tuple(flow.name for flow in flows if flow.name == NOTIFICATIONS)
    others = tuple(flow.name for flow in flows if flow.name != NOTIFICATIONS)
    kinds: dict[str, Aged | OldRuns] = {
        "EVENTS": EVENTS,
        "LOGS": LOGS,
        "ATTEMPTS": ATTEMPTS,
        "SLOTS": SLOTS,
        "JOBS": jobs.KEPT_JOBS,
        "WORKFLOWS": WORKFLOWS,
        "PAID_RESULTS": store.KEPT,
        "SPEND": SPEND,
        "LEASES": LEASES,
        "AUDIT_TRAIL": audit_trail.KEPT,
        "DELIVERIES": OldRuns("deliveries", deliveries),
        "RUNS": OldRuns("runs", others),
        "AUDITS": audits.KEPT,
        "RULE_RUNS": rule_runs.KEPT,
        "FICHES": fiches.KEPT,
    }
    rules = [Rule(one, FIXED) for one in (idempotency.KEPT, start.KEPT, schedules.KEPT, jobs.KEPT)]
    for name, kind in kinds.items():
        days = getattr(settings, knob := f"ECLUSE_KEEP_{name}_DAYS")
        rules.append(Rule(kind, timedelta(days=days) if days else None, knob))
    return rules


def keep_days(settings: Settings) -> dict[str, int]:
    """Return the knobs of retention by name, in days; 0 means for ever."""
    return {name: getattr(settings, name) for name in Settings.model_fields if name.startswith("ECLUSE_KEEP_")}
