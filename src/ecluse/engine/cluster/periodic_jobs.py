"""The list of the engine's periodic jobs, with their intervals."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ecluse.base.clock import Clock
from ecluse.engine.cluster import alerts, forced_ends, sweeps
from ecluse.engine.cluster.repeat import Job
from ecluse.engine.effects import budgets, probe, reservations
from ecluse.engine.lanes import rows
from ecluse.engine.lanes.rates import restore_quiet_lanes
from ecluse.engine.lead.new_runs import NewRuns
from ecluse.engine.model.context import WorkContext
from ecluse.engine.model.flow import Flow
from ecluse.engine.model.roles import Role
from ecluse.engine.runs import leases
from ecluse.engine.runs.lifecycle import CLOSING_CHANNEL, ENDED_CHANNEL, RUNS_CHANNEL
from ecluse.engine.schedule.slot_decisions import FiringLimits
from ecluse.engine.schedule.ticks import TICK_SECONDS, Scheduler
from ecluse.engine.work.worker import Worker

CLOCK_CHANNEL = "ecluse_clock"
SCHEDULER: frozenset[Role] = frozenset({"scheduler"})
WORKER_OR_SCHEDULER: frozenset[Role] = frozenset({"worker", "scheduler"})


def of_every_replica(flows: Mapping[str, Flow], clock: Clock, due: FiringLimits, every: float) -> list[Job]:
    """Return the periodic jobs that do not need a worker; the `roles` of each say which replicas run it. `every`:
    seconds between two runs of a sweep."""
    orphans = partial(forced_ends.end_orphans, flows=flows)
    stale = partial(forced_ends.end_stale, flows=flows)
    return [
        Job("setting the clock", every, partial(sweeps.set_clock, clock=clock), channels=[CLOCK_CHANNEL]),
        Job("ending orphaned runs", 1.0, orphans, channels=[ENDED_CHANNEL], rest=0.1, roles=WORKER_OR_SCHEDULER),
        Job("ending stale runs", every, stale, roles=WORKER_OR_SCHEDULER),
        Job("tick", TICK_SECONDS, Scheduler(flows, due).run, first=0.0, prompt=True, roles=SCHEDULER),
    ]


def of_worker(
    flows: Mapping[str, Flow],
    new_runs: NewRuns,
    worker: Worker,
    contexts: Mapping[str, WorkContext],
    replica: str,
    every: float,
) -> list[Job]:
    """Return the periodic jobs of a worker. `contexts`: the work contexts of the flows, by name; `every`: seconds
    between two runs of a sweep."""
    resume = sweeps.InterruptedWorkflows(replica).resume
    close = sweeps.SelfClosingRuns(flows).close
    # In a job of its own: it calls vendors, and no other sweep should wait for them.
    settle = partial(probe.settle_forgotten, flows=flows, contexts=contexts, replica=replica)
    jobs = [
        Job("taking new runs", every, new_runs.take, channels=[RUNS_CHANNEL], prompt=True),
        Job("dropping ended runs", 0.5, partial(sweeps.drop_ended, worker=worker)),
        # Any channel would do: it is a reconnect of the listener after an outage that should wake this job.
        Job("resuming interrupted workflows", 2.0, resume, channels=[CLOCK_CHANNEL]),
        Job("ending runs without a workflow", every, partial(sweeps.end_unled, flows=flows)),
        Job("closing complete runs", every, close, channels=[CLOSING_CHANNEL]),
        Job("ending expired leases", every, leases.end_expired),
        Job("removing unused lanes", 3600.0, rows.remove_unused),
        Job("settling writes in doubt", every, settle),
        Job("restoring the rates of slowed lanes", every, restore_quiet_lanes),
        Job("settling abandoned paid calls", every, reservations.settle_abandoned),
        Job("waking calls after changes of budgets", every, budgets.wake_after_changes),
        Job("waking calls when calls in flight leave room", 1.0, budgets.wake_after_calls),
    ]
    for flow in flows.values():
        jobs += [Job(f"watching {flow.name}", 15.0, partial(sweeps.run_flow_watch, flow=flow))] if flow.watch else []
        jobs += [Job(f"alerts of {flow.name}", 15.0, partial(alerts.evaluate, flow=flow))] if flow.alerts else []
    return jobs
