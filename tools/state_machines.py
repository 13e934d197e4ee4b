"""Print docs/state_machines.md: every state of a row, its meaning, and the moves between states.

The states of runs come from the table that the engine itself uses. The others are stated here and checked by
tests/engine/model/test_state_machines.py: their states equal those of the database's constraints; for items, effects
and replicas, every move observed in the tests is one of those listed. The moves of slots and leases are not checked.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from ecluse.engine import PLAIN, State

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
    "The words of a flow that brings none of its own, and the neutral state that each means (`runs.status`, "
    "`runs.state`; `engine/model/states.py`). A flow's own words are a table of the same kind. No move is made but by "
    "`runs.set_status`, which looks into this table. A run that is ended on request has the state `cancelled` (ended "
    "on request before its work was done) and the word `partial` if a target of it had succeeded, else `failed`.",
    {word: f"{state}: {NEUTRAL[state]}" for word, state in PLAIN.meaning.items()},
    {BEGIN: {PLAIN.initial: ""}} | {word: dict.fromkeys(sorted(to), "") for word, to in PLAIN.moves.items()},
)

ITEMS = Machine(
    "Items",
    "One unit of work (`items.status`, and `claim_id`: NULL is waiting).",
    {
        "waiting": "open, in nobody's hands; not before `due_at`",
        "in_hand": "open, under a claim of some replica",
        "succeeded": "done, its result stored in the same commit",
        "failed": "given up on, for this round (`permanent`: for good)",
        "ignored": "can never finish, and nobody is to blame",
    },
    {
        BEGIN: {"waiting": "fan-out", "failed": "could not be dispatched"},
        "waiting": {"in_hand": "claim", "failed": "deadline, end of run"},
        "in_hand": {
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
        "planned": "nothing is under way: not sent for sure, or refused for now",
        "sending": "the intent is committed; it may be applied at any moment",
        "unknown": "sent, without a definite answer; asked about after the quiet period",
        "applied": "the vendor has it",
        "rejected": "the vendor refused it",
        "not_applied": "read back, and not there",
        "conflict": "read back, and somebody else's value is there",
    },
    {
        BEGIN: {"sending": "intent", "applied": "was there already"},
        "planned": {"sending": "intent", "applied": "was there already"},
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
    "One due instant of a schedule, once it is decided on (`schedule_slots.state`).",
    {
        "fired": "it has a run",
        "waiting": "an earlier run of the schedule is still open",
        "skipped": "decided against, with a reason",
        "missed": "nobody was there in time, with a reason",
    },
    {
        BEGIN: {"fired": "due", "waiting": "overlap", "skipped": "outside its window", "missed": "too late"},
        "waiting": {"fired": "the run before ended", "skipped": "a later slot took its place"},
    },
)

LEASES = Machine(
    "Leases",
    "One holding of a key (`leases.ended_at`, `end_cause`). A new holding is a new row, with a higher fence.",
    {
        "held": "by a run for as long as it is open, or by a process for its time to live",
        "released": "given back by its holder",
        "expired": "its holder fell silent; the next one counts one more attempt",
        "forced": "taken away by a person, with a reason",
        "run ended": "the run that held it is over",
    },
    {BEGIN: {"held": ""}, "held": {"released": "", "expired": "", "forced": "", "run ended": ""}},
)

REPLICAS = Machine(
    "Replicas",
    "One start of a process (`replicas.state`; `engine/cluster/heartbeat.py`). A dead replica stays dead.",
    {
        "live": "beats, or has not been silent for long enough",
        "dead": "declared so by another after its silence; must not write any more",
        "left": "has said good-bye",
    },
    {BEGIN: {"live": "start"}, "live": {"dead": "silence", "left": "stop"}},
)

LANES = Machine(
    "Lanes",
    "Where items wait for a vendor; read from `paused_at` and `held_until`.",
    {
        "open": "items are started, within its caps and its rate",
        "held": "nothing is started before `held_until`: the vendor said when, or the breaker is open; then one call "
        "at a time probes the vendor until it answers (`trips` above 0: down since `failing_since`)",
        "paused": "nothing is started until a person resumes it",
    },
    {
        BEGIN: {"open": "start-up"},
        "open": {"held": "Retry-After, breaker", "paused": "operator"},
        "held": {"open": "time", "paused": "operator"},
        "paused": {"open": "operator"},
    },
)

MACHINES = (RUNS, ITEMS, EFFECTS, SLOTS, LEASES, REPLICAS, LANES)


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
    head = "# State machines\n\nGenerated by `make docs` (tools/state_machines.py). Every state says what it means."
    return "\n\n".join([head, *map(drawn, MACHINES)]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
