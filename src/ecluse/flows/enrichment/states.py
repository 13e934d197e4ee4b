"""The states of a company's enrichment, the transitions between them, and what the results of the sources mean. Pure;
`records.py` writes the states by compare-and-set."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ecluse.base.errors import ForbiddenTransition
from ecluse.vendors.registers import RETRYABLE, ErrorCode, Source


class Status(StrEnum):
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUCCESS = "SUCCESS"
    PARTIAL = "PARTIAL"
    FAILED = "FAILED"
    STALE = "STALE"


class Trigger(StrEnum):
    CREATED = "REQUEST_CREATED"
    OPENED = "REQUEST_OPENED"
    MANUAL = "MANUAL_REFRESH"


@dataclass(frozen=True)
class TriggerRequest:
    """A trigger of enrichment by a request for a company. `key` tells repeated triggers of a request apart; `by`: the
    name of the caller, for a new request."""

    tenant: str
    siren: str
    trigger: Trigger
    correlation: str
    request_id: int = 0
    siret: str | None = None
    key: str = ""
    by: str = ""


MOVES: Mapping[Status, frozenset[Status]] = {
    Status.PENDING: frozenset({Status.RUNNING}),
    Status.RUNNING: frozenset({Status.SUCCESS, Status.PARTIAL, Status.FAILED}),
    Status.SUCCESS: frozenset({Status.STALE}),
    Status.PARTIAL: frozenset({Status.STALE, Status.RUNNING}),
    Status.FAILED: frozenset({Status.RUNNING}),
    Status.STALE: frozenset({Status.RUNNING}),
}
MEANING: Mapping[Status, str] = {  # the state of a run that pages show in the same colour
    Status.PENDING: "waiting",
    Status.RUNNING: "running",
    Status.SUCCESS: "succeeded",
    Status.PARTIAL: "partial",
    Status.FAILED: "failed",
    Status.STALE: "expired",
}
BY_HAND = {(Status.SUCCESS, Status.RUNNING)}  # only for a manual refresh (G-57)
REQUIRED = (Source.SEARCH,)
LONGEST_ERROR = 2_000  # characters


def may_move(before: Status, after: Status, trigger: Trigger | None = None) -> bool:
    """Return whether a company may go from one state to another; `trigger`: the trigger of the job that moves it."""
    return after in MOVES[before] or (trigger is Trigger.MANUAL and (before, after) in BY_HAND)


def check_move(siren: str, before: Status, after: Status, trigger: Trigger | None = None) -> None:
    """Raise ForbiddenTransition if the company may not go from `before` to `after` (`may_move`)."""
    if not may_move(before, after, trigger):
        raise ForbiddenTransition(f"company {siren}", before, after)


@dataclass(frozen=True)
class Fetched:
    """The final result of one source in a job; `error_code` None: it succeeded."""

    source: Source
    error_code: str | None = None
    http_status: int | None = None
    message: str | None = None

    @property
    def status(self) -> str:
        return "SUCCESS" if self.error_code is None else "FAILED"

    @property
    def retryable(self) -> bool:
        return self.error_code in RETRYABLE

    def as_error(self) -> dict[str, object] | None:
        """Return the internal error of the job for this source; None if it succeeded."""
        if self.error_code is None:
            return None
        return {
            "error_code": self.error_code,
            "source_api": self.source,
            "http_status": self.http_status,
            "message": self.message,
            "retryable": self.retryable,
        }


@dataclass(frozen=True)
class Evaluation:
    """What the results of the sources mean for the company: state, counters, and the aggregated error."""

    status: Status
    core_identity_present: bool
    sources_success_count: int
    required_sources_failed_count: int
    optional_sources_failed_count: int
    enrichment_error: str | None
    relaunchable: bool  # an optional source failed in a way that a retry may cure

    @property
    def sources_failed_count(self) -> int:
        return self.required_sources_failed_count + self.optional_sources_failed_count

    @property
    def counters(self) -> dict[str, int | bool]:
        return {
            "sources_success_count": self.sources_success_count,
            "sources_failed_count": self.sources_failed_count,
            "core_identity_present": self.core_identity_present,
            "required_sources_failed_count": self.required_sources_failed_count,
            "optional_sources_failed_count": self.optional_sources_failed_count,
        }


def complete(asked: Collection[Source], fetched: Sequence[Fetched]) -> list[Fetched]:
    """Return one result per source that the job was to ask, in the canonical order. A source without a result counts as
    failed: the job was ended before it answered."""
    known = {one.source: one for one in fetched}
    missing = "the job ended before the source answered"
    return [known.get(one) or Fetched(one, ErrorCode.UNKNOWN, None, missing) for one in Source if one in asked]


def evaluate(fetched: Sequence[Fetched], *, core_identity: bool) -> Evaluation:
    """Evaluate the results of all sources that a job was to ask. `core_identity`: the merged facts have the legal name
    of the company."""
    failed = [one for one in fetched if one.error_code is not None]
    required = sum(one.source in REQUIRED for one in failed)
    optional = len(failed) - required
    # An unknown number is FAILED even if the name is known from an earlier job.
    good = Status.PARTIAL if optional else Status.SUCCESS
    status = Status.FAILED if required or not core_identity else good
    return Evaluation(
        status,
        core_identity,
        len(fetched) - len(failed),
        required,
        optional,
        enrichment_error(failed, core_identity=core_identity),
        status is Status.PARTIAL and any(one.retryable for one in failed),
    )


def enrichment_error(failed: Sequence[Fetched], *, core_identity: bool) -> str | None:
    """Return the failed sources as `SOURCE:HTTP:ERROR_CODE`, joined by `|`, cut between entries at LONGEST_ERROR; None
    if there is nothing to report. If the required source answered and there is no legal name (`core_identity` False),
    CORE_IDENTITY_MISSING comes first."""
    entries = [f"{one.source}:{one.http_status or '-'}:{one.error_code}" for one in failed]
    if not core_identity and not any(one.source in REQUIRED for one in failed):
        entries.insert(0, f"{Source.SEARCH}:200:{ErrorCode.CORE_IDENTITY_MISSING}")
    text = ""
    for entry in entries:
        longer = f"{text}|{entry}" if text else entry
        if len(longer) > LONGEST_ERROR:
            break
        text = longer
    return text or None
