"""Tracers for the log lines of a transcription: one per function, each bound to the fiche and its run, so that
`workflow_logs` can be queried by either."""

from __future__ import annotations

from ecluse.base.trace import Tracer
from ecluse.engine import Item, Run
from ecluse.flows.transcriptions import rules


def _tracer(area: str, function: str, run: Run | Item, fiche_id: str, ids: str) -> Tracer:
    run_id = run.id if isinstance(run, Run) else run.run_id
    return Tracer(
        area=area,
        workflow=rules.FLOW,
        entity=("fiche", fiche_id),
        tenant_id=run.tenant_id,
        correlation_id=run.correlation_id or run.event_key,
        run_id=run_id,
        trace_id=str(run_id),
        function_id=function,
        ids=ids,
    )


def orchestrator(run: Run | Item, fiche_id: str) -> Tracer:
    """Return the tracer for the run of a fiche as a whole."""
    return _tracer("TRANSCRIPTION", rules.ORCHESTRATOR, run, fiche_id, fiche_id)


def worker(item: Item) -> Tracer:
    """Return the tracer for the work on a recording."""
    fiche_id = item.payload["fiche_id"]
    return _tracer("TX-WORKER", rules.WORKER, item, fiche_id, f"{fiche_id}/{item.key}")


def finalizer(item: Item) -> Tracer:
    """Return the tracer for the steps after the end of a recording."""
    fiche_id = item.payload["fiche_id"]
    return _tracer("TX-FINALIZER", rules.FINALIZER, item, fiche_id, f"{fiche_id}/{item.key}")
