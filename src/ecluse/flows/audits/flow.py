"""The audit stage, for every flow that has items for it, and the flow of one audit requested by hand: a run of one
item, without a story."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ecluse.access.envelope import Refused
from ecluse.access.tenants import DEFAULT
from ecluse.base.clock import Clock
from ecluse.base.errors import NotFound
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_rows
from ecluse.engine import VENDOR_DOWN, Event, Flow, Lane, RetryPolicy, Run, Stage, open_stage
from ecluse.flows.audits import plan, store, work
from ecluse.flows.audits.plan import AuditToPlan
from ecluse.flows.audits.store import STAGE
from ecluse.flows.connections import records as connections
from ecluse.flows.fiches.ids import FicheId

FLOW = "audit"
# Waiting for the vendor's rate limit is no stall: it may take days.
PATIENCE = timedelta(days=14)
# LLM calls: three attempts, with pauses of one and four seconds.
LLM_CALLS = RetryPolicy(executions=3, base=1.0, multiplier=4.0)
HANDLING = timedelta(seconds=60)  # in addition to the call itself

LOOK_UP = """
SELECT k.run_id, f.id, c.id, c.version, c.is_active
FROM unnest(%s::bigint[], %s::text[], %s::text[], %s::bigint[]) AS k(run_id, tenant_id, fiche_id, config_id)
LEFT JOIN fiche_cache f ON f.tenant_id = k.tenant_id AND f.fiche_id = k.fiche_id
LEFT JOIN audit_configs c ON c.tenant_id = k.tenant_id AND c.id = k.config_id AND c.deleted_at IS NULL
"""


@dataclass(frozen=True)
class Config:
    """Knobs of audits, for all flows that have an audit stage."""

    concurrency: int = 20
    per_minute: float | None = None
    call_seconds: float = 120
    max_input_chars: int = 400_000
    model: str | None = None  # of the environment, where an audit config names none


def audit_stage(
    config: Config,
    *,
    max_wait: timedelta = PATIENCE,
    poll: timedelta = timedelta(seconds=20),
    rounds: int = 0,
    incomplete: str = "Audit not finished in time (timeout/stall)",
) -> Stage:
    """Build the stage for items of `plan_audits`, of a flow whose `vendors` are `connections.registry.Vendors`.
    `max_wait`, `poll` and `rounds` are settings of the stage's gate; `incomplete` is the error of audits that are not
    finished in time. The flow must call `record_failures` when its runs end."""
    return Stage(
        STAGE,
        Lane(
            "llm",
            tenant=DEFAULT,
            max_in_flight=config.concurrency,
            per_second=None if config.per_minute is None else Lane.per_minute(config.per_minute),
            breaker=VENDOR_DOWN,
        ),
        partial(work.audit, config.max_input_chars),
        on_end=store.save_ends,
        news=store.news,
        paid=True,
        retry=LLM_CALLS,
        time_limit=timedelta(seconds=config.call_seconds) + HANDLING,
        max_wait=max_wait,
        poll=poll,
        rounds=rounds,
        incomplete=incomplete,
    )


class AuditRun(BaseModel):
    """Input of a run of one audit, requested by hand: the payload of the event `audit/run`."""

    model_config = ConfigDict(extra="forbid")

    fiche_id: FicheId
    audit_config_id: str = Field(pattern=r"^[1-9][0-9]{0,17}$", examples=["3"])
    use_rlm: bool = False


class Audit:
    """The flow `audit`, built from its settings; each of its runs is one audit, requested by hand."""

    def __init__(self, config: Config, vendors: Callable[[Clock], AbstractAsyncContextManager[Any]]) -> None:
        self.config = config
        self.stage = audit_stage(config)
        self.flow = Flow(FLOW, (self.stage,), None, AuditRun, vendors=vendors, begin=self._begin, ended=_ended)

    async def _begin(self, connection: Connection, runs: Sequence[Run]) -> None:
        """Plan the audit of each new run and open its stage. Raise NotFound or Refused if its fiche or config cannot be
        audited, and Conflict if its tenant has no connection to a model."""
        by_id = {run.id: run for run in runs}
        columns = [(run.id, run.tenant_id, run.input["fiche_id"], int(run.input["audit_config_id"])) for run in runs]
        found = await fetch_rows(connection, LOOK_UP, [list(column) for column in zip(*columns, strict=True)])
        wanted = []
        for run_id, fiche, config, version, active in found:
            run = by_id[run_id]
            _require(run, fiche, config, active)
            given = run.input
            wanted.append(
                AuditToPlan(run.tenant_id, run.id, given["fiche_id"], config, version, given["use_rlm"], "api")
            )
        await connections.require(connection, {(run.tenant_id, "llm") for run in runs})
        items = await plan.plan(connection, wanted, self.stage.lane, self.config.model)
        await open_stage(connection, self.stage, [(run, items[run.id]) for run in runs], select=True)


def _require(run: Run, fiche: int | None, config: int | None, active: bool | None) -> None:
    """Raise NotFound if the fiche of a run is not cached or its config does not exist, Refused (409) if the config is
    not active."""
    if fiche is None:
        raise NotFound(f"There is no fiche {run.input['fiche_id']}: it has to be fetched and transcribed first.")
    if config is None:
        raise NotFound(f"There is no audit config {run.input['audit_config_id']}.")
    if not active:
        message = f"Audit config {config} is not active: switch it on, or choose another."
        raise Refused(409, "CONFIG_INACTIVE", message)


async def _ended(connection: Connection, runs: Sequence[Run]) -> Sequence[Event]:
    """Mark the unfinished audits of ended runs as failed (`record_failures`). Used as the `ended` of the flow."""
    await store.record_failures(connection, [run.id for run in runs])
    return ()
