"""Start of a transcription run, or attachment to the open one, and the wait for its end: for callers that need the
transcripts.

No flow of Ecluse calls it: automation waits at the gate of its stage, and routes only enqueue. It exists for flows of
packages, because the requirements name it: TRX-05, TRX-55 and TRX-56 the wait, TRX-28 its limit
(`TRANSCRIPTION_MAX_WAIT_SECONDS`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from ecluse.db.connect import Connection
from ecluse.engine.kit import Kit
from ecluse.flows.fiches.cache import states
from ecluse.flows.transcriptions import rules
from ecluse.flows.transcriptions.events import counts_of
from ecluse.flows.transcriptions.flow import FicheTranscribe
from ecluse.flows.transcriptions.rules import Counts
from ecluse.flows.transcriptions.start import start
from ecluse.insight import run_queries


@dataclass(frozen=True)
class Transcribed:
    """The result of `start_and_wait`. `status` and `reason` are None if the end of the run was not awaited or not
    reached. `total`, `transcribed` and `pending` count the fiche's current recordings; `counts` are the present counts
    of the run, all zero before it has a plan."""

    fiche_id: str
    event_id: str
    run_id: int
    attached: bool
    timed_out: bool
    status: str | None
    reason: str | None
    total: int
    transcribed: int
    pending: int
    counts: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "run_id": str(self.run_id)}


async def start_and_wait(
    kit: Kit,
    tenant: str,
    wanted: FicheTranscribe,
    *,
    max_wait: timedelta,
    event_id: str | None = None,
    parent_run_id: int | None = None,
) -> Transcribed:
    """Start a run of a fiche or attach to its open one; if `wanted.wait_for_completion`, wait for its end, for at most
    `max_wait`. The wait is for the run's row, not for its event, which may be published just before the wait begins. A
    wait that times out sets `timed_out` and raises nothing: the caller decides. `event_id`: by default one of this
    request alone."""
    async with kit.pool.connection() as connection:
        (started,) = await start(
            connection,
            kit.flow(rules.FLOW),
            tenant,
            [wanted.fiche_id],
            event_ids=[event_id or rules.click_id(wanted.fiche_id, int(kit.clock.now().timestamp() * 1000))],
            priority=wanted.priority,
            wait_for_completion=wanted.wait_for_completion,
            refresh=wanted.refresh,
            parent_run_id=parent_run_id,
        )
    ended = wanted.wait_for_completion and await kit.wait_for_run(started.run_id, max_wait)
    async with kit.pool.connection() as connection:
        row = await run_queries.show_run(connection, tenant, started.run_id)
        total, transcribed, counts = await _standing(connection, tenant, wanted.fiche_id, started.run_id)
    return Transcribed(
        *started[:2],
        run_id=started.run_id,
        attached=started.attached,
        timed_out=wanted.wait_for_completion and not ended,
        status=row["status"] if ended else None,
        reason=(row["error_message"] or row["reason"]) if ended else None,
        total=total,
        transcribed=transcribed,
        pending=total - transcribed,
        counts=counts,
    )


async def _standing(connection: Connection, tenant: str, fiche_id: str, run_id: int) -> tuple[int, int, dict[str, int]]:
    """Return the number of recordings of the fiche, the number of transcribed ones, and the counts of the run."""
    known = (await states(connection, tenant, [fiche_id])).get(fiche_id)
    _, counts = (await counts_of(connection, {run_id})).get(run_id, (fiche_id, Counts()))
    return known.total_recordings if known else 0, known.transcribed if known else 0, counts.as_dict()
