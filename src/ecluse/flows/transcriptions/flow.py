"""The transcription flow: one run per fiche, without a story. Its first item fetches the fiche again from the CRM; the
commit that stores the answer also plans the run and opens one item per recording without a transcript. The commit of
the last item ends the run: summary, `transcription.completed` or `.failed`, `fiche/transcribed`; its leases end with
it.

    start ─▶ refresh ─▶ plan ─┬▶ known       (paid for already, or without URL: no call)
                              └▶ recordings  (speech-to-text, at the provider's pace) ─▶ end
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from ecluse.access.envelope import Refused
from ecluse.access.tenants import DEFAULT
from ecluse.base.clock import Clock
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_column
from ecluse.engine import (
    VENDOR_DOWN,
    Flow,
    Lane,
    NewItem,
    RetryPolicy,
    Run,
    Saved,
    Stage,
    hold_for_runs,
    open_stage,
)
from ecluse.flows.connections import lanes
from ecluse.flows.connections import records as connections
from ecluse.flows.fiches.fetch import Fetched, save_details
from ecluse.flows.fiches.ids import FicheId
from ecluse.flows.transcriptions import events, plan, rules, store, traces, watchdog, work
from ecluse.flows.transcriptions.config import Config

# Items queued behind the provider's rate cap may wait for days: that is not a stall.
PATIENCE = timedelta(days=14)
# At most three CRM reads, with pauses of one and four seconds.
CRM_READS = RetryPolicy(executions=3, base=1.0, multiplier=4.0)

# The six attempts of a recording take a minute. A longer `doubt` would give a recording that always fails a seventh.
# A failed download says nothing about the provider: recordings are stored elsewhere.
PROVIDER_DOWN = replace(VENDOR_DOWN, doubt=timedelta(seconds=60), silent=frozenset({rules.AUDIO_UNAVAILABLE}))

PUT_RUNS = """
INSERT INTO transcription_runs (run_id, tenant_id, fiche_id)
SELECT * FROM unnest(%s::bigint[], %s::text[], %s::text[])
"""
# Runs whose fiche is not `ready` in the cache: they cannot be planned, even if their input says not to refresh.
UNFETCHED = """
SELECT t.run_id FROM transcription_runs t
LEFT JOIN fiche_states f ON f.tenant_id = t.tenant_id AND f.fiche_id = t.fiche_id
WHERE t.run_id = ANY(%s) AND f.details IS DISTINCT FROM 'ready'
"""


class Taken(Refused):
    """Another run holds the lease on this fiche. `start` catches it, retries, and then attaches to that run."""

    def __init__(self, fiche_id: str, run_id: int | None) -> None:
        message = f"Fiche {fiche_id} is being transcribed (run {run_id}): wait for that one."
        super().__init__(409, "ALREADY_RUNNING", message)


class FicheTranscribe(BaseModel):
    """Input of a transcription run: the payload of the event `fiche/transcribe`. `refresh` is false if a parent run has
    just fetched the fiche."""

    model_config = ConfigDict(extra="forbid")

    fiche_id: FicheId
    priority: Literal["high", "normal", "low"] = "normal"
    wait_for_completion: bool = True
    refresh: bool = True


class Transcription:
    """The flow `transcription` and its stages, built from the settings."""

    def __init__(self, config: Config, vendors: Callable[[Clock], AbstractAsyncContextManager[Any]]) -> None:
        self.config = config
        progress = events.Progress(config.progress_every)
        do = work.bound(config)
        self.refresh = Stage(
            rules.REFRESH,
            # A lane of its own, not shared with other flows: this cap is a setting of ours, not a limit of the CRM.
            Lane("crm-transcription", tenant=DEFAULT, max_in_flight=config.fiche_concurrency, breaker=VENDOR_DOWN),
            do[rules.REFRESH],
            save=self._plan,
            opens=True,
            retry=CRM_READS,
            max_wait=PATIENCE,
        )
        news = partial(events.news, progress)
        self.known = Stage(
            rules.KNOWN, Lane("here"), do[rules.KNOWN], save=store.save_known, news=news, max_wait=PATIENCE, last=True
        )
        self.recordings = Stage(
            rules.RECORDINGS,
            Lane(
                "elevenlabs",
                tenant=DEFAULT,
                max_in_flight=config.recording_concurrency,
                max_per_key=config.per_fiche,
                per_second=Lane.per_minute(config.per_minute),
                breaker=PROVIDER_DOWN,
            ),
            do[rules.RECORDINGS],
            save=store.save_recordings,
            news=news,
            last=True,
            paid=True,
            retry=RetryPolicy(executions=config.attempts, base=config.backoff_base, longest=config.backoff_longest),
            time_limit=config.time_limit,
            max_wait=PATIENCE,
        )
        stages = (self.refresh, self.known, self.recordings)
        self.flow = Flow(
            rules.FLOW,
            stages,
            None,
            FicheTranscribe,
            tables=("transcription_runs",),
            vendors=vendors,
            begin=self._begin,
            ended=events.ended,
            watch=partial(watchdog.watch, config.stall, [stage.lane.name for stage in stages]),
        )

    async def _begin(self, connection: Connection, runs: Sequence[Run]) -> None:
        """Open the first stage of new runs; plan a run at once if it need not refresh and its fiche is cached. Raise
        Taken if another run holds the lease on a fiche, Conflict if a tenant lacks a connection to a vendor: none of
        the runs begins then."""
        tenants = {run.tenant_id for run in runs}
        await connections.require(connection, [(tenant, kind) for tenant in tenants for kind in ("crm", "speech")])
        fiches = [run.input["fiche_id"] for run in runs]
        await connection.execute(PUT_RUNS, ([run.id for run in runs], [run.tenant_id for run in runs], fiches))
        locks = [(run.id, run.tenant_id, rules.fiche_lock(run.input["fiche_id"])) for run in runs]
        held = await hold_for_runs(connection, locks)
        for run_id, tenant, key in locks:
            if held[tenant, key] != run_id:
                raise Taken(key.rpartition(":")[2], held[tenant, key])
        # Without a speech-to-text key every run refreshes: that stage fails at once with the reason.
        with_key = tenants if self.config.configured else await connections.of_tenants(connection, "speech", tenants)
        at_once = {run.id for run in runs if run.tenant_id in with_key and not run.input["refresh"]}
        at_once -= set(await fetch_column(connection, UNFETCHED, (list(at_once),)))
        later = [run for run in runs if run.id not in at_once]
        lane = await lanes.of_tenants(connection, "crm", self.refresh.lane, tenants)
        for priority in sorted({run.input["priority"] for run in later}):
            first = [
                (run, [NewItem(run.input["fiche_id"], "", dict(run.input), lane=lane[run.tenant_id])])
                for run in later
                if run.input["priority"] == priority
            ]
            await open_stage(connection, self.refresh, first, priority=priority)
        # Writing thousands of log lines takes a while: do it after the leases are held, and not between statements that
        # may wait for locks.
        for run in runs:
            options = {name: run.input[name] for name in ("priority", "wait_for_completion")}
            traces.orchestrator(run, run.input["fiche_id"]).start("transcribe-fiche", **options)
        if at_once:
            known = [run for run in runs if run.id in at_once]
            await plan.plan(connection, known, self.known, self.recordings, self.config)

    async def _plan(self, connection: Connection, saved: Sequence[Saved]) -> None:
        """Store the fetched fiches and plan their runs, in the commit that stores the results. Used as the `save` of
        the stage `refresh`."""
        await save_details(connection, [Fetched(one.item.tenant_id, one.item.key, one.kept) for one in saved])
        runs = [
            Run(item.run_id, item.tenant_id, item.flow, item.event_key, item.payload, item.correlation_id)
            for item in (one.item for one in saved)
        ]
        await plan.plan(connection, runs, self.known, self.recordings, self.config)
