"""Log lines and realtime events of a run's gates, written at each poll."""

from __future__ import annotations

from typing import Any

from ecluse.db.connect import Connection
from ecluse.engine import EmitLive, Redispatch, Run, StageProgress, Wait
from ecluse.flows.automation import events
from ecluse.flows.automation.transcripts import Transcripts


async def seen(
    emit: EmitLive, phase: str, what: str, connection: Connection, run: Run, look: StageProgress, decision: Any
) -> None:
    """Log and emit the progress of a gate. The gate calls it at each poll, with its counts (`look`) and its `decision`;
    a decision to send missing fetches or audits again is logged as a warning. `phase`: the run's phase; `what`: the
    name of the stage in log lines."""
    done = look.succeeded + look.ignored
    if phase == "auditing":
        counted = f"{look.finished}/{look.expected} (completed={look.succeeded}, failed={look.failed})"
    else:
        counted = f"{done}/{look.expected}"
    await events.log_line(connection, run, f"{what} progress: {counted}")
    emit([events.progress(run, phase, done, look.expected, look.failed)])
    if isinstance(decision, Redispatch) and phase == "fetching":
        message = "Fiche details stalled; retrying incomplete fetches"
        await events.log_line(connection, run, message, "warning", round=decision.round)
    if isinstance(decision, Redispatch) and phase == "auditing":
        message = f"Audits stalled; sending the missing ones again (round {decision.round})"
        await events.log_line(connection, run, message, "warning", missing=look.expected - done)


async def seen_transcribing(
    emit: EmitLive, transcripts: Transcripts, connection: Connection, run: Run, look: StageProgress, decision: Any
) -> None:
    """Log and emit the progress of the transcription gate as `seen` does; while the gate waits, take over fiches whose
    transcription by another run has ended unfinished."""
    await seen(emit, "transcribing", "Transcription", connection, run, look, decision)
    if isinstance(decision, Wait):
        await transcripts.take_over(connection, run, look.round)
