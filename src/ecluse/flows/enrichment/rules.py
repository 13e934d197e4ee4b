"""Pure decisions: which SIREN and SIRET are valid, whether the cache is fresh, and whether a job is started. `now` is
an argument."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from stdnum import luhn
from stdnum.fr import siren, siret

from ecluse.base.errors import InvalidInput
from ecluse.flows.enrichment.states import Status, Trigger

FLOW = "enrichment"
PRODUCER = "M3"
LOCK_TTL = timedelta(seconds=120)
LA_POSTE = "356000000"


@dataclass(frozen=True)
class Limits:
    """The knobs of the cache and of automatic relaunches."""

    fresh: timedelta = timedelta(days=30)
    after_failure: timedelta = timedelta(minutes=15)
    after_partial: timedelta = timedelta(hours=24)


def lock_key(siren: str) -> str:
    return f"company_enrichment:{siren}"


def job_key(siren: str, trigger: str, now: datetime) -> str:
    """Return the idempotency key of a job: company, trigger and UTC day."""
    return f"{siren}:{trigger}:{now.astimezone(UTC):%Y-%m-%d}"


def identifiers(company_siren: str | None, company_siret: str | None) -> tuple[str, str | None]:
    """Return SIREN and SIRET without blanks; raise InvalidInput if one is invalid, both differ, or none is given."""
    given_siren, given_siret = _digits(company_siren), _digits(company_siret)
    if given_siren is None and given_siret is None:
        raise InvalidInput("company_siren or company_siret: give at least one of them")
    if given_siret is not None and not _is_siret(given_siret):
        raise InvalidInput("company_siret: a SIRET has 14 digits, the last of which checks the others")
    if given_siren is not None and not (
        given_siren.isascii() and given_siren.isdigit() and siren.is_valid(given_siren)
    ):
        raise InvalidInput("company_siren: a SIREN has 9 digits, the last of which checks the others")
    if given_siren is not None and given_siret is not None and not given_siret.startswith(given_siren):
        raise InvalidInput("company_siret: its first 9 digits are another SIREN than company_siren")
    return given_siren or (given_siret or "")[:9], given_siret


def _digits(text: str | None) -> str | None:
    return None if text is None else "".join(text.split())


def _is_siret(text: str) -> bool:
    if not (text.isascii() and text.isdigit() and len(text) == 14):
        return False
    # Establishments of La Poste have a check sum of their own; those that have the common one are valid, too.
    return bool(siret.is_valid(text) or (text.startswith(LA_POSTE) and luhn.is_valid(text)))


@dataclass(frozen=True)
class Known:
    """The state of a company that decisions depend on. `updated_at`: the last merge; `ended_at`: the end of its last
    job."""

    status: Status
    updated_at: datetime | None
    ended_at: datetime | None = None
    relaunchable: bool = False
    open_job: bool = False


def is_fresh(known: Known, limits: Limits, now: datetime) -> bool:
    """Return whether the stored data may be used without asking a source. Data exactly `limits.fresh` old may not."""
    return known.updated_at is not None and now - known.updated_at < limits.fresh


def is_stale(known: Known, limits: Limits, now: datetime) -> bool:
    """Return whether the company is to be marked STALE: it has data, and they are too old."""
    return known.status in (Status.SUCCESS, Status.PARTIAL) and not is_fresh(known, limits, now)


def kept_until(known: Known, limits: Limits) -> datetime | None:
    """Return until when only a manual refresh starts a job: the data are fresh, or a job has just failed."""
    failed_at = known.ended_at if known.status is Status.FAILED else None
    kept = ((known.updated_at, limits.fresh), (failed_at, limits.after_failure))
    return max((at + time for at, time in kept if at is not None), default=None)


Decision = Literal["cached", "attach", "start"]


def decide(known: Known, trigger: Trigger, limits: Limits, now: datetime) -> Decision:
    """Decide what a trigger leads to: the open job (`attach`), a new job (`start`), or the stored data (`cached`), if
    they are fresh or a job has just failed. A manual refresh never uses the stored data."""
    if known.open_job:
        return "attach"
    if trigger is Trigger.MANUAL:
        return "start"
    until = kept_until(known, limits)
    return "cached" if until is not None and now < until else "start"


def is_due(known: Known, limits: Limits, now: datetime) -> bool:
    """Return whether the sweep relaunches the company: it is stale; it is pending without a job; or it is partial and
    the missing source may answer now."""
    if known.open_job:
        return False
    if known.status in (Status.PENDING, Status.STALE) or is_stale(known, limits, now):
        return True
    partial = known.status is Status.PARTIAL and known.relaunchable
    return partial and known.ended_at is not None and now - known.ended_at >= limits.after_partial
