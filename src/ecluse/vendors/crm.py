"""CRM client: the fiches sold on a day, and one fiche with its recordings. The contract is docs/crm-api.md.

An unusable row does not fail the answer: it is left out and reported in `skipped`, and the other rows are used.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, date, datetime
from functools import partial
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError

from ecluse.base.errors import PermanentError, TransientError, VendorError
from ecluse.base.text import LONGEST_FOREIGN_ID, storable
from ecluse.vendors.http import VendorHttp, first_problem
from ecluse.vendors.names import Names

NAMES = Names("CRM_BASE_URL", "CRM_API_KEY")
NOT_FOUND = "NOT_FOUND"
NO_SALES = date(2000, 1, 1)  # a day whose list is short
PING_SECONDS = 15.0
LONGEST_CALL = 30 * 24 * 3600  # seconds; a longer duration is taken as an error


def id_text(value: Any) -> Any:
    """Return a number or a text as stripped text; other values are returned unchanged and fail the type check."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value.strip() if isinstance(value, str) else value


def url_text(value: Any) -> str:
    """Return the stripped URL, or an empty text if there is none."""
    return value.strip() if isinstance(value, str) else ""


def instant(value: Any) -> datetime | None:
    """Parse an ISO 8601 instant; without a zone it is UTC. None if it cannot be parsed."""
    try:
        at = datetime.fromisoformat(value.strip())
        # Some systems send 0001-01-01 as an empty date: converted to UTC it may underflow (OverflowError).
        return at.astimezone(UTC) if at.tzinfo is not None else at.replace(tzinfo=UTC)
    except (AttributeError, ValueError, OverflowError):
        return None


def seconds(value: Any) -> float | None:
    """Return a duration as a float; None if it is not a number, negative or longer than LONGEST_CALL."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and 0 <= value <= LONGEST_CALL else None


Id = Annotated[str, Field(min_length=1, max_length=LONGEST_FOREIGN_ID), BeforeValidator(id_text)]
Name = Annotated[
    str | None,
    BeforeValidator(id_text),
    AfterValidator(lambda name: storable(name, LONGEST_FOREIGN_ID) if name else None),
]


class SalesFiche(BaseModel):
    """A row of the sales list; `data` is the whole row."""

    id: Id
    groupe: Name = None
    data: dict[str, Any]


class Sales(BaseModel):
    """The sales list of a day."""

    fiches: list[SalesFiche]
    skipped: list[str]  # one line per unusable row, with the reason


class Recording(BaseModel):
    """A recording of a fiche. `recording_url` is empty if the CRM has none."""

    call_id: Id
    recording_url: Annotated[str, BeforeValidator(url_text)] = ""
    start_time: Annotated[datetime | None, BeforeValidator(instant)] = None
    duration_s: Annotated[float | None, BeforeValidator(seconds)] = None


class FicheDetails(BaseModel):
    """A fiche in full, with its usable recordings."""

    message: str
    groupe: Name = None
    attribution_user_id: Name = None
    information: dict[str, Any]  # the whole object
    recordings: list[Recording]
    skipped: list[str]  # unusable recordings, as in Sales


class SalesAnswer(BaseModel):
    """The CRM's answer to a request for a sales list; its rows are not validated yet."""

    fiches: list[Any]


class FicheAnswer(BaseModel):
    """The CRM's answer to a request for a fiche; its recordings are not validated yet."""

    success: bool
    message: str | None = None
    information: dict[str, Any] | None = None
    recordings: list[Any] | None = None

    @property
    def is_gone(self) -> bool:
        """True if the answer means that the CRM does not know the fiche."""
        return not self.success and NOT_FOUND in (self.message or "").upper()


class Crm:
    """Client of the CRM. Without a URL (`http` None) or a key each call raises NOT_CONFIGURED. `names`: the settings
    that errors advise to change."""

    def __init__(self, http: VendorHttp | None, api_key: str | None, names: Names = NAMES) -> None:
        self._http = http
        self._api_key = api_key
        self._names = names
        if http is not None:
            http.hide(api_key)

    async def ping(self) -> None:
        """Make a cheap call with the key; raise a `VendorError` if the CRM does not accept it, or is unavailable."""
        await self.sales(NO_SALES, deadline=PING_SECONDS)

    async def sales(self, day: date, *, deadline: float | None = None) -> Sales:
        """Return the fiches sold on a day, each once. `deadline`, in seconds: instead of the client's."""
        http, headers = self._ready()
        answer = await http.call(
            "GET",
            "/sales",
            SalesAnswer,
            query={"date": day.strftime("%d/%m/%Y")},
            headers=headers,
            deadline=deadline,
            explain=partial(explain, names=self._names, listing=True),
        )
        rows = ({**row, "data": row} if isinstance(row, dict) else row for row in answer.fiches)
        fiches, skipped = usable(SalesFiche, "sales row", rows)
        by_id: dict[str, SalesFiche] = {}
        for fiche in fiches:
            by_id.setdefault(fiche.id, fiche)
        return Sales(fiches=list(by_id.values()), skipped=skipped)

    async def fiche(self, fiche_id: str) -> FicheDetails:
        """Return one fiche with its recordings, one per call id. Raise `PermanentError` NOT_FOUND if the CRM does not
        know the fiche, another `VendorError` if the call fails or the answer is incomplete."""
        http, headers = self._ready()
        if not fiche_id.strip("."):
            raise PermanentError(f"crm: {fiche_id!r} cannot be the id of a fiche", code=NOT_FOUND)
        path = f"/fiches/{quote(fiche_id, safe='')}"
        answer = await http.call(
            "GET", path, FicheAnswer, headers=headers, explain=partial(explain, names=self._names, listing=False)
        )
        message = http.said(answer.message or "")
        subject = f"{http.name} GET {path}"
        if not answer.success:
            if answer.is_gone:
                raise PermanentError(f"{subject}: {message}", code=NOT_FOUND)
            # The cause is unknown and may be temporary, and a read can be retried at no cost.
            raise TransientError(f"{subject}: success is false: {message}", code="CRM_UNSUCCESSFUL", ambiguous=False)
        # Without the list, recordings removed in the CRM could not be distinguished from an incomplete answer.
        if answer.information is None or "recordings" not in answer.model_fields_set:
            raise TransientError(f"{subject}: a success without information or recordings", code="BAD_ANSWER")
        recordings, skipped = usable(Recording, "recording", answer.recordings or ())
        by_call: dict[str, Recording] = {}
        for recording in recordings:
            if recording.call_id not in by_call or not by_call[recording.call_id].recording_url:
                by_call[recording.call_id] = recording
        try:
            return FicheDetails.model_validate(
                {
                    **{name: answer.information.get(name) for name in ("groupe", "attribution_user_id")},
                    "message": message,
                    "information": answer.information,
                    "recordings": list(by_call.values()),
                    "skipped": skipped,
                }
            )
        except ValidationError as exc:
            raise TransientError(f"{subject}: information: {first_problem(exc)}", code="BAD_ANSWER") from exc

    def _ready(self) -> tuple[VendorHttp, dict[str, str]]:
        """Return the HTTP client and the headers of a call; raise NOT_CONFIGURED if URL or key is missing."""
        if self._http is None or not self._api_key:
            why = f"The CRM is not configured: set {self._names.url} and {self._names.key}."
            raise PermanentError(why, code="NOT_CONFIGURED")
        return self._http, {"Authorization": f"Bearer {self._api_key}"}


def explain(error: VendorError, answer: bytes, *, names: Names, listing: bool) -> VendorError:
    """Add advice for the operator to the error of a refused call, and return the error. `listing`: the call asked for a
    sales list."""
    if error.status in (401, 403):
        hint = f"the CRM does not accept {names.key}, or it has too few rights: set another one"
        return error.explained(f"{error.message}: {hint}")
    # NOT_FOUND is final for a fiche: only accept it from the CRM itself, not from another server at a wrong address.
    if error.status == 404 and (listing or not says_gone(answer)):
        hint = "there is no sales list here" if listing else "this is not how the CRM says that a fiche is gone"
        return error.explained(f"{error.message}: {hint}: check {names.url}", code="VENDOR_REFUSED")
    return error


def says_gone(answer: bytes) -> bool:
    """Return True if this body is the CRM's own answer that it does not know the fiche."""
    try:
        return FicheAnswer.model_validate_json(answer, strict=True).is_gone
    except ValidationError:
        return False


R = TypeVar("R", bound=BaseModel)


def usable(model: type[R], what: str, rows: Iterable[Any]) -> tuple[list[R], list[str]]:
    """Return the rows that are valid for `model`, and one line for each other row; `what` names a row in these
    lines."""
    good, skipped = [], []
    for position, row in enumerate(rows, 1):
        try:
            good.append(model.model_validate(row))
        except ValidationError as exc:
            skipped.append(f"{what} {position}: {first_problem(exc)}")
    return good, skipped
