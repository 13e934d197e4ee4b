"""The kit: runs, items, claims, group commit, gates, outcomes. It knows no flow, no vendor, no HTTP.

These names are the whole of what a flow, a face or the composition root may use of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ecluse.engine import counts, reading
from ecluse.engine.fan_out import Priority
from ecluse.engine.flow import (
    AbsoluteWrite,
    Breaker,
    Done,
    Flow,
    Ignored,
    Item,
    KeyedWrite,
    Lane,
    Live,
    NewItem,
    News,
    Order,
    Over,
    Postponed,
    Result,
    Run,
    Save,
    Saved,
    Source,
    Stage,
    Tell,
    Work,
    WorkContext,
    Write,
)
from ecluse.engine.gate import Counted, Look, Redispatch, Wait
from ecluse.engine.gathering import Looks
from ecluse.engine.lanes import list_lanes
from ecluse.engine.lanes import pause as pause_lane
from ecluse.engine.lanes import resume as resume_lane
from ecluse.engine.leases import (
    Held,
    Lease,
    LeaseLost,
    force_release,
    hold_for_runs,
    holders,
    list_leases,
    still_mine,
)
from ecluse.engine.leases import acquire as acquire_lease
from ecluse.engine.leases import release as release_lease
from ecluse.engine.opening import give_up, open_stage, wake_workers
from ecluse.engine.outbox import EVENTS_CHANNEL, Event, PublishedEvent, Sink, read_published
from ecluse.engine.outbox import write as write_events
from ecluse.engine.retry import RetryPolicy
from ecluse.engine.roles import ROLES, Role
from ecluse.engine.runs import TENANT, Start, Started, announce, keep_open, note_errors
from ecluse.engine.runs import begin_many as begin_runs
from ecluse.engine.runs import insert as insert_run
from ecluse.engine.runs import insert_many as insert_runs
from ecluse.engine.runs import load as load_run
from ecluse.engine.runs import load_many as load_runs
from ecluse.engine.schedules import (
    NewSchedule,
    create_schedule,
    delete_schedule,
    enable_schedule,
    fire_by_hand,
    list_schedules,
    load_schedule,
    show_schedule,
    update_schedule,
)
from ecluse.engine.slots import Rules
from ecluse.engine.states import PLAIN, State, Words
from ecluse.engine.targets import Settled, open_targets, settle_targets
from ecluse.engine.targets import select as select_targets
from ecluse.engine.waiting import Waiting, why

if TYPE_CHECKING:
    from ecluse.engine.closing import end_by_operator
    from ecluse.engine.kit import Kit
    from ecluse.engine.orchestration import migrate
    from ecluse.engine.story import Story

# They bring the orchestration along, which takes longer to import than all the rest: a command that only looks at the
# database need not wait for it.
HEAVY = {"Kit": "kit", "Story": "story", "end_by_operator": "closing", "migrate": "orchestration"}


def __getattr__(name: str) -> Any:
    if name not in HEAVY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HEAVY[name]}"), name)


__all__ = [
    "EVENTS_CHANNEL",
    "PLAIN",
    "ROLES",
    "TENANT",
    "AbsoluteWrite",
    "Breaker",
    "Counted",
    "Done",
    "Event",
    "Flow",
    "Held",
    "Ignored",
    "Item",
    "KeyedWrite",
    "Kit",
    "Lane",
    "Lease",
    "LeaseLost",
    "Live",
    "Look",
    "Looks",
    "NewItem",
    "NewSchedule",
    "News",
    "Order",
    "Over",
    "Postponed",
    "Priority",
    "PublishedEvent",
    "Redispatch",
    "Result",
    "RetryPolicy",
    "Role",
    "Rules",
    "Run",
    "Save",
    "Saved",
    "Settled",
    "Sink",
    "Source",
    "Stage",
    "Start",
    "Started",
    "State",
    "Story",
    "Tell",
    "Wait",
    "Waiting",
    "Words",
    "Work",
    "WorkContext",
    "Write",
    "acquire_lease",
    "announce",
    "begin_runs",
    "counts",
    "create_schedule",
    "delete_schedule",
    "enable_schedule",
    "end_by_operator",
    "fire_by_hand",
    "force_release",
    "give_up",
    "hold_for_runs",
    "holders",
    "insert_run",
    "insert_runs",
    "keep_open",
    "list_lanes",
    "list_leases",
    "list_schedules",
    "load_run",
    "load_runs",
    "load_schedule",
    "migrate",
    "note_errors",
    "open_stage",
    "open_targets",
    "pause_lane",
    "read_published",
    "reading",
    "release_lease",
    "resume_lane",
    "select_targets",
    "settle_targets",
    "show_schedule",
    "still_mine",
    "update_schedule",
    "wake_workers",
    "why",
    "write_events",
]
