"""Print docs/state_machines.md: every state of a row, its meaning, and the moves between states.

The states of runs and companies come from the tables that the program itself uses. The others are stated here and
checked by tests/engine/model/test_state_machines.py: their states equal those of the database's constraints; for items,
effects and replicas, every move observed in the tests is one of those listed. The moves of slots and leases are not
checked.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from ecluse.engine import PLAIN, State
from ecluse.flows.enrichment.states import MOVES, Status

BEGIN = ""  # before the row exists: the move from here leads to its first state


@dataclass(frozen=True)
class Machine:
    title: str
    about: str
    meaning: Mapping[str, str]  # each state, in one line
    moves: Mapping[str, Mapping[str, str]]  # from a state, to each next state -> the reason


NEUTRAL = {
    State.DRAFT: "exists, not asked to run",
    State.QUEUED: "asked to run, nothing done yet",
    State.RUNNING: "work is under way",
    State.SUCCEEDED: "ended, no failure",
    State.PARTIAL: "ended, with failures and successes",
    State.FAILED: "ended, failures and no success, or ended by force",
    State.CANCELLED: "ended on request before its work was done",
    State.SKIPPED: "ended without having to do anything",
    State.REVERTED: "ended, then undone",
    State.EXPIRED: "its result is too old to be used",
}

RUNS = Machine(
    "Runs",
    "The statuses of a flow without statuses of its own, and the neutral state of each (`runs.status`, `runs.state`; "
    "`engine/model/states.py`). A flow's own statuses are a table of the same kind. Only `lifecycle.set_status` moves "
    "a run, and only along this table. A run that is ended on request has the state `cancelled` (ended on "
    "request before its work was done) and the status `partial` if one of its targets had succeeded, else `failed`.",
    {status: f"{state}: {NEUTRAL[state]}" for status, state in PLAIN.meaning.items()},
    {BEGIN: {PLAIN.initial: ""}} | {status: dict.fromkeys(sorted(to), "") for status, to in PLAIN.moves.items()},
)

ITEMS = Machine(
    "Items",
    "One unit of work (`items.status`, and `claim_id`: NULL is waiting).",
    {
        "waiting": "open, not claimed; not claimed before `due_at`",
        "in_flight": "open, claimed by a replica",
        "succeeded": "done, its result stored in the same commit",
        "failed": "given up, for this round (`permanent`: for good)",
        "ignored": "cannot finish, without being a failure",
    },
    {
        BEGIN: {"waiting": "fan-out", "failed": "could not be dispatched"},
        "waiting": {"in_flight": "claim", "failed": "deadline, end of run"},
        "in_flight": {
            "succeeded": "commit",
            "ignored": "commit",
            "failed": "commit, deadline, end of run",
            "waiting": "retry, take-over, hand-over",
        },
        "failed": {"waiting": "further round"},
    },
)

EFFECTS = Machine(
    "Effects",
    "One wanted write at a vendor (`effects.state`; `engine/effects/protocol.py`).",
    {
        "planned": "not in flight: certainly not sent, or refused for now",
        "sending": "the intent is committed; the vendor may apply the write at any moment",
        "unknown": "sent, without a definite answer; read back after the quiet period",
        "applied": "the vendor has applied it",
        "rejected": "the vendor refused it",
        "not_applied": "read back: the vendor has not applied it",
        "conflict": "read back: another client has changed the record",
    },
    {
        BEGIN: {"sending": "intent", "applied": "already in the wanted state"},
        "planned": {"sending": "intent", "applied": "already in the wanted state"},
        "sending": {
            "applied": "answer, read back",
            "rejected": "answer",
            "planned": "not sent",
            "unknown": "no definite answer",
            "not_applied": "read back",
            "conflict": "read back",
        },
        "unknown": {
            "sending": "intent, same key",
            "applied": "read back",
            "not_applied": "read back",
            "conflict": "read back",
        },
    },
)

SLOTS = Machine(
    "Slots",
    "One due instant of a schedule, once it is decided (`schedule_slots.state`, with the reason in `reason`; "
    "`engine/schedule/slot_decisions.py`).",
    {
        "fired": "it has a run, or what its flow made instead",
        "waiting": "an earlier run of the schedule is still open",
        "skipped": "not fired on purpose: a later instant was due (superseded), an earlier run was open for too long "
        "(overlap), outside the execution window, the tenant is disabled, or the schedule was changed, disabled or "
        "deleted",
        "missed": "no scheduler was running in time, and it was not caught up on",
        "failed": "its flow could not fire it (flows that fire without runs)",
    },
    {
        BEGIN: {
            "fired": "due",
            "waiting": "overlap",
            "skipped": "superseded, overlap, outside the window, tenant disabled, schedule changed",
            "missed": "too late",
            "failed": "its flow refused, or raised an error",
        },
        "waiting": {
            "fired": "the run before ended",
            "skipped": "a later slot took its place, the look-back is over, outside the window, tenant disabled, "
            "schedule changed",
        },
    },
)

LEASES = Machine(
    "Leases",
    "One holding of a key (`leases.ended_at`, `end_cause`). A new holding is a new row, with a higher fence.",
    {
        "held": "by a run for as long as it is open, or by a process for its time to live; a run's may have one, too",
        "released": "released by its holder",
        "expired": "not renewed by its holder; the next holding counts one more attempt",
        "forced": "released by an operator, with a reason",
        "run ended": "the run that held it is over",
    },
    {BEGIN: {"held": ""}, "held": {"released": "", "expired": "", "forced": "", "run ended": ""}},
)

REPLICAS = Machine(
    "Replicas",
    "One start of a process (`replicas.state`; `engine/cluster/heartbeat.py`). A dead replica stays dead.",
    {
        "live": "sends heartbeats, or has not been silent for long enough",
        "dead": "declared dead by another replica after its silence; can no longer write",
        "left": "has stopped normally",
    },
    {BEGIN: {"live": "start"}, "live": {"dead": "silence", "left": "stop"}},
)

LANES = Machine(
    "Lanes",
    "Where items wait for a vendor; read from `paused_at` and `held_until`.",
    {
        "open": "items are started, within its caps and its rate",
        "held": "nothing is started before `held_until`: a `Retry-After`, or the breaker is open; then one call "
        "at a time probes the vendor until it answers (`trips` above 0: down since `failing_since`)",
        "paused": "nothing is started until an operator resumes it",
    },
    {
        BEGIN: {"open": "start-up"},
        "open": {"held": "Retry-After, breaker", "paused": "operator"},
        "held": {"open": "time", "paused": "operator"},
        "paused": {"open": "operator"},
    },
)

COMPANIES = Machine(
    "Companies",
    "The enrichment of a company (`companies.enrichment_status`; `flows/enrichment/states.py`). Only "
    "`flows/enrichment/records.py` moves a company, and only along this table.",
    {
        Status.PENDING: "asked for, and no register was called yet",
        Status.RUNNING: "a job calls the registers, under the lock of the company",
        Status.SUCCESS: "every register that was asked has answered",
        Status.PARTIAL: "the required register has answered, an optional one has not",
        Status.FAILED: "the required register has not answered, or no name is known; earlier data stay",
        Status.STALE: "the data are older than `ENRICHMENT_FRESHNESS_TTL_DAYS`",
    },
    {
        BEGIN: {"PENDING": ""},
        **{str(before): {str(to): "" for to in sorted(after)} for before, after in MOVES.items()},
        "SUCCESS": {"RUNNING": "manual refresh", "STALE": ""},
    },
)

MACHINES = (RUNS, ITEMS, EFFECTS, SLOTS, LEASES, REPLICAS, LANES, COMPANIES)


def drawn(machine: Machine) -> str:
    lines = [f"## {machine.title}", "", machine.about, "", "| state | meaning |", "| --- | --- |"]
    lines += [f"| `{state}` | {meaning} |" for state, meaning in machine.meaning.items()]
    lines += ["", "```mermaid", "stateDiagram-v2"]
    lines += [f'    state "{state}" as {_name(state)}' for state in machine.meaning if _name(state) != state]
    for before, moves in machine.moves.items():
        for after, why in moves.items():
            start = _name(before) if before else "[*]"
            lines.append(f"    {start} --> {_name(after)}{': ' + why if why else ''}")
    lines += [f"    {_name(state)} --> [*]" for state in machine.meaning if not machine.moves.get(state)]
    return "\n".join([*lines, "```"])


def _name(state: str) -> str:
    return state.replace(" ", "_")


def page() -> str:
    head = "# State machines\n\nGenerated by `make docs` (tools/state_machines.py)."
    return "\n\n".join([head, *map(drawn, MACHINES)]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
