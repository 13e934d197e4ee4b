"""Faults of runs that were ended on request, or by force (I-01, I-02, I-19)."""

from __future__ import annotations

from tests.verify.plants import OVERDUE, Fault, of, sql, then

FAULTS = [
    Fault("I-01", "more cancelled than there are", "counts 0 cancelled targets",
          of("cancelled", "runs", "cancelled = 0")),
    Fault("I-02", "cancelled, yet failed", "give cancelled",
          of("cancelled", "runs", "state = 'failed', cancelled = 0")),
    Fault(
        "I-02",
        "cancelled with a success, yet failed",
        "failed does not match state cancelled",
        then(
            of("cancelled", "runs", "status = 'failed'"),
            sql("UPDATE run_log SET message = 'running -> failed'"
                " WHERE run_id = %(cancelled)s AND message ~ 'partial'"),
        ),
    ),
    Fault(
        "I-19",
        "a run that only an ended one waited for",
        "1 runs that only it waited for are open",
        then(
            of("stopped", "runs", "ends_waited_for = true, ended_at = ended_at - interval '2 minutes'"),
            sql("INSERT INTO run_waiters (run_id, waiter_run_id) VALUES (%(waiting)s, %(stopped)s)"),
        ),
    ),
    Fault("I-19", "marked to be ended, by no run", "no ended run is left that ends it",
          of("waiting", "runs", "ending = true")),
]  # fmt: skip

HARMLESS = {
    "a stage whose clock stands still with the lane that it needs": then(
        of("running", "stages", OVERDUE),
        sql("UPDATE lanes SET paused_at = now(), paused_by = 'a', paused_reason = 'x', clock_stopped_at = now()"),
    ),
}
