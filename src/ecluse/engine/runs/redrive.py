"""Redrives: a new run over targets that failed in an ended run. The choice of the targets, its preview and its refusals
are the same for every flow; the flow decides how the new run is started (`Flow.redrive`)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from ecluse.base.errors import Conflict
from ecluse.base.text import count_of
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_all, fetch_rows
from ecluse.engine.model.flow import Flow, Run
from ecluse.engine.runs.outcomes import CANCELLED
from ecluse.engine.runs.start import Started

Which = Literal["failed", "cancelled", "all"]

# Codes of permanent failures that are not the record's fault, but that of a setting, a key, a crash of workers or the
# end of the run.
MAY_HEAL = (
    *(
        "INCOMPLETE",
        "BUDGET_EXCEEDED",
        "RUN_ENDED",
        "STALLED",
        "WORKER_CRASHED",
        "STORE_FAILED",
        "DISPATCH_FAILED",
        "BUG",
    ),
    *("NOT_CONFIGURED", "UNAUTHORIZED", "FORBIDDEN", "FORBIDDEN_URL", "QUOTA_EXCEEDED", "SEALED", "NO_KEY"),
)
FAILED = """
SELECT o.target, o.error_code, o.reason, f.stage, CASE WHEN f.for_good THEN f.error_code END AS cause,
       CASE WHEN f.for_good THEN f.error END AS why
FROM outcomes o LEFT JOIN (
    SELECT DISTINCT ON (target) target, stage, error_code, error,
           permanent AND error_code <> ALL(%(may_heal)s) AS for_good
    FROM items WHERE run_id = %(run)s AND status = 'failed' AND target <> ''
    ORDER BY target, permanent AND error_code <> ALL(%(may_heal)s) DESC, error_code, error) f ON f.target = o.target
WHERE o.run_id = %(run)s AND o.outcome = 'failed' ORDER BY o.target
"""
# Ended redrives only: while one is open, a repeated start returns it.
SUCCEEDED_SINCE = """
WITH RECURSIVE chain AS (
    SELECT id, ended_at FROM runs WHERE redrive_of = %s
    UNION ALL SELECT r.id, r.ended_at FROM chain c JOIN runs r ON r.redrive_of = c.id)
SELECT o.target, max(o.run_id) FROM chain c JOIN outcomes o ON o.run_id = c.id
WHERE c.ended_at IS NOT NULL AND o.outcome = 'successful' GROUP BY 1
"""
STATUS = "SELECT status, ended_at IS NOT NULL FROM runs WHERE id = %s"


class FailedTarget(NamedTuple):
    """A target that failed or was cancelled. `cause` and `why` (the error code and the text of the failure) are set if
    it cannot succeed unless it is changed. `healed_in`: the latest redrive in which it has succeeded since."""

    target: str
    error_code: str | None
    reason: str | None = None
    stage: str | None = None
    cause: str | None = None
    why: str | None = None
    healed_in: int | None = None

    @property
    def cancelled(self) -> bool:
        return self.error_code == CANCELLED


class Choice(NamedTuple):
    """The choice of the failed targets to repeat. `outcome`: "failed" leaves out cancelled targets, "cancelled" all
    others. `leave_out_hopeless` leaves out targets that cannot succeed unless they are changed."""

    outcome: Which = "failed"
    error_code: str | None = None
    stage: str | None = None
    leave_out_hopeless: bool = False
    include_succeeded: bool = False  # also targets that have succeeded since, in a redrive of the run

    def matches(self, one: FailedTarget) -> bool:
        return (
            (self.outcome == "all" or one.cancelled == (self.outcome == "cancelled"))
            and self.error_code in (None, one.error_code)
            and self.stage in (None, one.stage)
        )

    def wants(self, one: FailedTarget) -> bool:
        return self.matches(one) and (self.include_succeeded or one.healed_in is None)

    def takes(self, one: FailedTarget) -> bool:
        return self.wants(one) and not (self.leave_out_hopeless and one.cause)


class Estimate(NamedTuple):
    """The estimated effort of a redrive, as far as it is known: calls that cost time or money (their number by kind),
    seconds and cost. `without_cost`: the kinds of calls whose cost is unknown and not included."""

    calls: dict[str, int] = {}  # noqa: RUF012 - never changed
    seconds: float | None = None
    cost: str | None = None
    without_cost: Sequence[str] = ()


class Redrive:
    """The way in which a flow repeats failed targets of a run, in a new run that is linked to it. Flows subclass it."""

    most: int = 50_000  # targets that one redrive takes

    async def failed(self, connection: Connection, run: Run) -> list[FailedTarget]:
        return await failed_targets(connection, run)

    async def estimate(self, connection: Connection, run: Run, taken: Sequence[FailedTarget]) -> Estimate:  # noqa: ARG002
        return Estimate()  # nothing is known, unless the flow says so

    async def start(
        self, connection: Connection, flow: Flow, run: Run, targets: Sequence[str], correlation_id: str | None
    ) -> Started:
        """Start the new run, and return it; each flow defines this. While that run is open, a repeated start must
        return it."""
        raise NotImplementedError


async def _failed(connection: Connection, how: Redrive, run: Run) -> list[FailedTarget]:
    """Return the failed targets of the run, each with the latest redrive in which it has succeeded since."""
    healed = dict(await fetch_rows(connection, SUCCEEDED_SINCE, (run.id,)))
    failed = await how.failed(connection, run)
    return failed if not healed else [one._replace(healed_in=healed.get(one.target)) for one in failed]


async def failed_targets(connection: Connection, run: Run, statement: str = FAILED) -> list[FailedTarget]:
    return await fetch_all(connection, FailedTarget, statement, {"run": run.id, "may_heal": list(MAY_HEAL)})


async def redrive(
    connection: Connection, flow: Flow, run: Run, choice: Choice, *, correlation_id: str | None = None
) -> Started:
    """Repeat the chosen targets of an ended run, at most `Redrive.most` of them, in a new run. While that run is open,
    a second request returns it. Raise Conflict if the run is open, no target is chosen, or the flow has no redrives."""
    how = redrive_of(flow)
    async with connection.transaction():
        await _ended(connection, run)
        failed = await _failed(connection, how, run)
        targets = (await asyncio.to_thread(chosen, run.id, failed, choice))[: how.most]
        return await how.start(connection, flow, run, targets, correlation_id)


async def preview_redrive(connection: Connection, how: Redrive, run: Run, choice: Choice) -> dict[str, Any]:
    """Return the preview of a redrive: the chosen targets by error code, and the estimate of its calls, time and cost.
    Raise Conflict if the run is open."""
    await _ended(connection, run)
    failed = await _failed(connection, how, run)
    # In a thread, as the overview: a run may have 50,000 failed targets.
    taken = (await asyncio.to_thread(_taken, failed, choice))[: how.most]
    view = await asyncio.to_thread(overview, failed, choice)
    estimate = await how.estimate(connection, run, taken)
    return {
        "run_id": str(run.id),
        "flow": run.flow,
        "count": len(taken),
        **view,
        "calls": estimate.calls,
        "expected_seconds": estimate.seconds,
        "expected_cost": estimate.cost,
        "without_cost": list(estimate.without_cost),
    }


def overview(failed: Sequence[FailedTarget], choice: Choice) -> dict[str, Any]:
    """Return the counts for the preview of a redrive: failed and cancelled targets; targets that match the choice and
    have succeeded since; and of the chosen ones, the number by error code, and the number that cannot succeed unless
    they are changed, by cause."""
    healed = [one.healed_in for one in failed if one.healed_in is not None and choice.matches(one)]
    wanted = [one for one in failed if choice.wants(one)]
    hopeless = [one for one in wanted if one.cause]
    cancelled, lost = sum(one.cancelled for one in failed), Counter(one.error_code for one in hopeless)
    groups = _grouped((one.error_code, one.target, one.reason) for one in wanted)
    return {
        "failed": len(failed) - cancelled,
        "cancelled": cancelled,
        "succeeded_since": len(healed),
        "succeeded_in": [str(run_id) for run_id in sorted(set(healed))],
        "cannot_succeed": len(hopeless),
        "groups": [{**group, "cannot_succeed": lost[group["error_code"]]} for group in groups],
        "causes": _grouped((one.cause, one.target, one.why) for one in hopeless),
    }


def chosen(run_id: int, failed: Sequence[FailedTarget], choice: Choice) -> list[str]:
    """Return the targets to repeat. If there are none, raise Conflict, which says why."""
    if taken := _taken(failed, choice):
        return [one.target for one in taken]
    view = overview(failed, choice)
    if causes := view["causes"]:
        named = ", ".join(f"{one['count']} {one['error_code']}" for one in causes)
        why = f"None of the targets that failed in run {run_id} can succeed as it is: {named}."
        raise Conflict(why, code="ONLY_HOPELESS")
    if since := view["succeeded_since"]:
        where = ", ".join(view["succeeded_in"])
        of = f"that failed in run {run_id}"
        have = count_of(since, f"target {of} has", f"targets {of} have")
        why = f"{have} succeeded since, in run {where}: no other one is left."
        raise Conflict(f"{why} To repeat them nevertheless, set include_succeeded.", code="SUCCEEDED_SINCE")
    if failed and (choice.error_code or choice.stage):
        why = f"{count_of(len(failed), 'target')} failed in run {run_id}, but none with this error_code and stage."
        raise Conflict(why, code="NOTHING_CHOSEN")
    if choice.outcome == "failed" and failed:
        cancelled = count_of(len(failed), "unfinished target was", "unfinished targets were")
        why = f"Nothing failed in run {run_id}, but {cancelled} cancelled: start the redrive with outcome all."
        raise Conflict(why, code="ONLY_CANCELLED")
    if failed:
        why = f"No targets were cancelled in run {run_id}, but {len(failed)} failed: "
        raise Conflict(f"{why}redrive them with outcome failed or all.", code="NOTHING_CHOSEN")
    why = f"Nothing failed in run {run_id}: there is nothing to redrive. Start a new run instead."
    raise Conflict(why, code="NOTHING_FAILED")


def _taken(failed: Sequence[FailedTarget], choice: Choice) -> list[FailedTarget]:
    return [one for one in failed if choice.takes(one)]


def _grouped(rows: Iterable[tuple[str | None, str, str | None]]) -> list[dict[str, Any]]:
    """Count targets by error code, the most frequent first; the first target of each code is its example."""
    found: dict[str | None, dict[str, Any]] = {}
    for code, target, why in rows:
        group = found.setdefault(code, {"error_code": code, "count": 0, "target": target, "error": why})
        group["count"] += 1
    return sorted(found.values(), key=lambda one: (-one["count"], one["error_code"] or ""))


def redrive_of(flow: Flow) -> Redrive:
    """Return how the flow repeats failed targets. Raise Conflict if its runs cannot be redriven."""
    if flow.redrive is None:
        instead = flow.not_by_hand or f"Start a new run of it: `ecluse runs start {flow.name}`, or POST /api/runs."
        raise Conflict(f"Runs of flow {flow.name} cannot be redriven. {instead}", code="NO_REDRIVE")
    return flow.redrive


async def _ended(connection: Connection, run: Run) -> None:
    """Raise Conflict if the run is still open."""
    ((status, ended),) = await fetch_rows(connection, STATUS, (run.id,))
    if not ended:
        why = f"Run {run.id} is still open ({status}): it can be redriven once it has ended."
        raise Conflict(why, code="RUN_NOT_ENDED")
