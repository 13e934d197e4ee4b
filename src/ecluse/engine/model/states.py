"""Run statuses: the engine's neutral states, each flow's own status words on the wire, and the transitions that a flow
allows. Pure functions; `lifecycle.set_status` is the only place that writes a run's status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from ecluse.base.errors import ForbiddenTransition


class State(StrEnum):
    """The neutral states of runs, which are the same for every flow."""

    DRAFT = "draft"  # exists, not asked to run
    QUEUED = "queued"  # asked to run, nothing done yet
    RUNNING = "running"  # work is under way
    SUCCEEDED = "succeeded"  # ended, no failure
    PARTIAL = "partial"  # ended, with failures and successes
    FAILED = "failed"  # ended, failures and no success, or ended by force
    CANCELLED = "cancelled"  # ended on request before its work was done
    SKIPPED = "skipped"  # ended without having to do anything
    REVERTED = "reverted"  # ended, then undone
    EXPIRED = "expired"  # its result is too old to be used


EndCause = Literal["normal", "operator", "parent", "stale", "catastrophic"]
ON_REQUEST: frozenset[EndCause] = frozenset({"operator", "parent"})  # an end that is not a failure


@dataclass(frozen=True)
class RunEnd:
    """The end of a run: its cause; error code and reason, if it ends by force; `by`: the operator who asked for the
    end, or the run whose end ends this one."""

    cause: EndCause
    code: str | None = None
    reason: str | None = None
    by: str | None = None


NORMAL = RunEnd("normal")


@dataclass(frozen=True)
class StatusMap:
    """A flow's own status words: the neutral state that each word means, and the allowed transitions between words."""

    meaning: Mapping[str, State]
    moves: Mapping[str, frozenset[str]]
    initial: str

    def __post_init__(self) -> None:
        unknown = ({self.initial} | set(self.moves) | {to for tos in self.moves.values() for to in tos}) - set(
            self.meaning
        )
        if unknown:
            raise ValueError(f"status words without a meaning: {sorted(unknown)}")

    def status(self, state: State, *, after: str) -> str:
        """Return the flow's status word for a neutral state, among the words that can follow `after`. Raise
        ForbiddenTransition if none of these means that state."""
        for status in sorted(self.moves.get(after, frozenset())):
            if self.meaning[status] is state:
                return status
        raise ForbiddenTransition("run", after, state.value)

    def check(self, before: str, after: str, subject: str = "run") -> None:
        """Raise ForbiddenTransition unless the subject may go from the status `before` to the status `after`."""
        if after not in self.moves.get(before, frozenset()):
            raise ForbiddenTransition(subject, before, after)


PLAIN = StatusMap(
    meaning={
        "queued": State.QUEUED,
        "running": State.RUNNING,
        "completed": State.SUCCEEDED,
        "partial": State.PARTIAL,
        "failed": State.FAILED,
    },
    moves={
        "queued": frozenset({"running", "failed"}),
        "running": frozenset({"completed", "partial", "failed"}),
    },
    initial="queued",
)


def terminal_state(successful: int, failed: int) -> State:
    """Return the state of a run that ends normally, from the numbers of its successful and failed targets. Ignored
    targets do not count; a run with nothing to do succeeds."""
    if failed == 0:
        return State.SUCCEEDED
    return State.PARTIAL if successful > 0 else State.FAILED


def ended_as(cause: EndCause, successful: int, failed: int) -> tuple[State, State]:
    """Return two states for a run that ends for this cause with these numbers of targets: its neutral state, and the
    state for which its status word is chosen. They differ for a cancelled run: flows have no word for that state, and
    show the outcome of the targets."""
    if cause == "normal":
        state = terminal_state(successful, failed)
        return state, state
    if cause in ON_REQUEST:
        return State.CANCELLED, State.PARTIAL if successful > 0 else State.FAILED
    return State.FAILED, State.FAILED


STOPPED = "stopped by an error"


def cause_in_words(cause: str | None) -> str | None:
    """Return the end cause of a run as people read it. On the wire, `end_cause` stays as it is stored."""
    return STOPPED if cause == "catastrophic" else cause
