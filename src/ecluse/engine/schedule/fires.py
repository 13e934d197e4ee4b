"""Firing of due instants for flows that fire without runs: each flow is called once per batch, with all its
instants."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from ecluse.db.connect import Connection
from ecluse.engine.model.fires import DueInstant, FiredAs, NotFired, Unfired
from ecluse.engine.model.flow import Flow
from ecluse.engine.schedule.slot_decisions import Decision, Schedule

Decided = Sequence[tuple[Schedule, Decision]]


async def fire_without_runs(connection: Connection, flows: Mapping[str, Flow], decided: Decided) -> Decided:
    """Fire the due instants of flows that have a `fire`. Return all decisions; for a fired instant, the decision gets
    the flow's reference, or becomes skipped or failed if the flow says so."""
    due: dict[str, list[DueInstant]] = defaultdict(list)
    for one, decision in decided:
        if decision.fires is not None and flows[one.flow].fire is not None:
            due[one.flow].append(DueInstant(one.id, one.tenant_id, decision.fires, one.overlap))
    results: dict[int, FiredAs | NotFired] = {}
    for name, instants in due.items():
        fire = flows[name].fire
        if fire is not None:
            results |= await fire(connection, instants)
    return [(one, _as_fired(decision, results.get(one.id))) for one, decision in decided]


def _as_fired(decision: Decision, result: FiredAs | NotFired | None) -> Decision:
    if result is None:
        return decision
    if isinstance(result, FiredAs):
        return decision.with_latest(reference=result.reference)
    return decision.with_latest(state=result.state, reason=result.reason)


async def pass_on_unfired(connection: Connection, flows: Mapping[str, Flow], decided: Decided) -> None:
    """Call `Flow.on_unfired` of each flow that has one, with the schedules whose latest decided instant was skipped,
    missed or failed. Earlier instants of a decision, and instants that wait, are not passed on."""
    unfired: dict[str, list[Unfired]] = defaultdict(list)
    for one, decision in decided:
        latest = decision.slots[-1] if decision.slots else None
        if latest is not None and latest.state in ("skipped", "missed", "failed"):
            unfired[one.flow].append(Unfired(one.id, one.tenant_id, latest.due_at, latest.state, latest.reason or ""))
    for name, instants in unfired.items():
        if (on_unfired := flows[name].on_unfired) is not None:
            await on_unfired(connection, instants)
