"""The engine: runs, items, claims, group commit, gates, outcomes. It knows no flow, no vendor, no HTTP.

Other packages (flows, API, pages, commands, the composition root) import the engine's names from here. Four names are
imported from their modules instead, because these import DBOS, which is slow to import, and commands that only read the
database should not wait for it: `kit.Kit`, `lead.story.Story`, `lead.durable.migrate` and
`work.completion.end_by_operator`."""

from ecluse.engine.cluster.repeat import Job
from ecluse.engine.effects.budgets import Budget, delete_budget, require_budget, set_budget
from ecluse.engine.lanes.caps import set_caps as set_lane_caps
from ecluse.engine.lanes.pause import MovedDeadline
from ecluse.engine.lanes.pause import needing as needing_lane
from ecluse.engine.lanes.pause import pause as pause_lane
from ecluse.engine.lanes.pause import resume as resume_lane
from ecluse.engine.lanes.rates import restore_lane, slow_lane
from ecluse.engine.lanes.rows import put_lanes, retire_lanes
from ecluse.engine.lead.gate import Redispatch, StageProgress, Wait
from ecluse.engine.model.alerts import Alert, Alerts, Measure, Measured
from ecluse.engine.model.batched import BatchedQuery
from ecluse.engine.model.breaker import VENDOR_DOWN, Breaker
from ecluse.engine.model.budget import Charge
from ecluse.engine.model.context import EmitLive, EphemeralEvent, WorkContext
from ecluse.engine.model.fires import DueInstant, FiredAs, NotFired, Unfired
from ecluse.engine.model.flow import FinishedItem, Flow, ItemEnd, Lane, NewItem, Run, Save, Saved, Stage, Work
from ecluse.engine.model.item import Done, Ignored, Item, Postponed, Result
from ecluse.engine.model.retry import Backoff, RetryPolicy, backoff
from ecluse.engine.model.roles import ROLES, RUNS_AT_ONCE, Role
from ecluse.engine.model.states import PLAIN, STOPPED, EndCause, State, StatusMap, cause_in_words, terminal_state
from ecluse.engine.model.throttle import Throttle
from ecluse.engine.model.writes import AbsoluteWrite, BatchWrite, KeyedWrite, Order, Write
from ecluse.engine.outbox.events import EVENTS_CHANNEL, Event, PublishedEvent, Sink, read_published
from ecluse.engine.outbox.events import write as write_events
from ecluse.engine.runs.leases import (
    Held,
    Lease,
    LeaseLost,
    force_release,
    hold_for_runs,
    holders,
    still_mine,
)
from ecluse.engine.runs.leases import acquire as acquire_lease
from ecluse.engine.runs.leases import release as release_lease
from ecluse.engine.runs.lifecycle import RunEnded, keep_open, load_run, load_runs, lock_open, lock_runs, note_errors
from ecluse.engine.runs.outcomes import CANCELLED, Settled, settle_targets
from ecluse.engine.runs.redrive import (
    Choice,
    Estimate,
    FailedTarget,
    Redrive,
    failed_targets,
    preview_redrive,
    redrive,
    redrive_of,
)
from ecluse.engine.runs.run_log import write as write_log
from ecluse.engine.runs.stages import Priority, give_up, open_stage, wake_workers
from ecluse.engine.runs.start import Start, Started, check_tenant_name, start_run, start_runs
from ecluse.engine.runs.targets import open_targets
from ecluse.engine.runs.targets import select as select_targets
from ecluse.engine.runs.units import Counted
from ecluse.engine.runs.waiters import Waiter, put_waiters
from ecluse.engine.schedule.plans import (
    Fired,
    Plans,
    change_planned,
    create_planned,
    delete_planned,
    parsed,
    plans_of,
)
from ecluse.engine.schedule.schedules import (
    NewSchedule,
    create_schedule,
    delete_schedule,
    enable_schedule,
    fire_by_hand,
    list_schedules,
    load_schedule,
    next_fires,
    show_schedule,
    update_schedule,
)
from ecluse.engine.schedule.slot_decisions import FiringLimits
