"""An engine that automates, with the sandbox as CRM, provider and model; schedules, runs, and what became of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from ecluse.engine import EphemeralEvent, Flow, Start
from ecluse.engine.kit import Kit
from ecluse.engine.schedule.slot_decisions import event_key
from ecluse.flows.audits import configs
from ecluse.flows.audits.flow import Config as AuditConfig
from ecluse.flows.automation import schedules, start
from ecluse.flows.automation.config import Config
from ecluse.flows.automation.flow import Automation
from ecluse.flows.automation.plan import Plan
from ecluse.flows.automation.selection_model import Override
from ecluse.testing.sandbox import SandboxProcess
from ecluse.vendors.guarded import GuardedHttp
from tests.support.audit_world import STEPS, quick
from tests.support.runs import wait_for_run
from tests.support.transcription_world import transcription
from tests.support.vendor_clients import vendors_at

PATIENCE = timedelta(seconds=60)
FAST = timedelta(seconds=0.2)
QUICK = {"details_poll": FAST, "transcription_poll": FAST, "audit_poll": FAST, "per_minute": 60_000.0}


def automation(
    sandbox: SandboxProcess,
    *,
    crm: dict[str, Any] | None = None,
    speech: dict[str, Any] | None = None,
    breaker: dict[str, Any] | None = None,
    **config: Any,
) -> tuple[Automation, Flow]:
    """And the flow of the transcriptions that it starts."""
    transcribing = transcription(sandbox, breaker=breaker, **(speech or {})).flow
    wanted = Config(**{**QUICK, **config})
    made = Automation(wanted, AuditConfig(concurrency=50), transcribing, vendors_at(sandbox, **(crm or {})))
    for name in ("revalidate", "fetch", "audit"):
        setattr(made, name, quick(getattr(made, name), breaker))
    made.flow = replace(made.flow, stages=(made.revalidate, made.fetch, made.audit))
    return made, transcribing


@dataclass
class World:
    kit: Kit
    flow: Flow
    sandbox: SandboxProcess
    query: Callable[..., list[Any]]
    lives: list[EphemeralEvent] = field(default_factory=list)
    tenant: str = "default"

    async def config(self, **given: Any) -> int:
        wanted = {"name": "Compliance", "steps": STEPS, "run_automatically": True, **given}
        async with self.kit.pool.connection() as connection, connection.transaction():
            return int((await configs.create(connection, self.tenant, wanted))["id"])

    async def schedule(self, *fiche_ids: str, secrets: Any = None, **given: Any) -> int:
        """Create a schedule and return its id: by hand, over these fiches, unless `given` says otherwise."""
        made = self.query("SELECT count(*) FROM schedules")[0][0] + 1
        wanted = {
            "name": f"schedule {made}",
            "schedule_type": "MANUAL",
            "fiche_selection": {"mode": "manual", "fiche_ids": list(fiche_ids)},
            **given,
        }
        async with self.kit.pool.connection() as connection:
            row = await schedules.create(
                connection,
                self.flow,
                self.tenant,
                Plan.model_validate(wanted),
                secrets=secrets,
                guard=GuardedHttp(["127.0.0.0/8"]),
            )
        return int(row["id"])

    async def trigger(self, schedule_id: int, **override: Any) -> int:
        async with self.kit.pool.connection() as connection:
            given = Override.model_validate(override) if override else None
            return (await start.start(connection, self.flow, self.tenant, schedule_id, given)).run.id

    def fired(self, schedule_id: int, due: datetime) -> Start:
        """As a tick would start it."""
        given = {"due_at": due.isoformat()}
        key = event_key(self.flow.slot_key, schedule_id, due)
        return Start(self.flow, key, self.tenant, given, schedule_id=schedule_id)

    async def ended(self, run_id: int, patience: timedelta = PATIENCE) -> dict[str, Any]:
        row = await wait_for_run(self.kit, run_id, patience)
        assert row["ended_at"] is not None, row
        return self.run(run_id)

    async def run_over(self, *fiche_ids: str, **given: Any) -> dict[str, Any]:
        return await self.ended(await self.trigger(await self.schedule(*fiche_ids, **given)))

    def run(self, run_id: int) -> dict[str, Any]:
        """Its row in the view that operators know."""
        return self._row("SELECT to_jsonb(r) FROM automation_runs r WHERE id = %s", run_id)

    def stated(self, schedule_id: int) -> dict[str, Any]:
        return self._row("SELECT to_jsonb(s) FROM automation_schedules s WHERE id = %s", schedule_id)

    def results(self, run_id: int) -> dict[str, tuple[str, str | None]]:
        """What became of each fiche, and why."""
        rows = self.query(
            "SELECT fiche_id, status, coalesce(error, ignore_reason) FROM automation_run_fiche_results"
            " WHERE run_id = %s ORDER BY fiche_id",
            run_id,
        )
        return {fiche: (status, why) for fiche, status, why in rows}

    def logs(self, run_id: int) -> list[str]:
        rows = self.query("SELECT message FROM automation_logs WHERE run_id = %s ORDER BY timestamp, id", run_id)
        return [message for (message,) in rows]

    def events(self, run_id: int, *names: str) -> list[tuple[str, dict[str, Any]]]:
        rows = self.query(
            "SELECT event_type, payload FROM events_outbox WHERE aggregate = %s ORDER BY id", f"run:{run_id}"
        )
        return [(name, payload) for name, payload in rows if not names or name in names]

    def calls(self, vendor: str, path: str = "") -> list[str]:
        """What was asked of a vendor, by what it was about."""
        return [e["ref"] for e in self.sandbox.ledger(vendor=vendor) if path in e.get("path", "")]

    def _row(self, sql: str, *given: Any) -> dict[str, Any]:
        ((row,),) = self.query(sql, *given)
        found: dict[str, Any] = row
        return found


def one_of(rows: Sequence[Any]) -> Any:
    (row,) = rows
    return row
