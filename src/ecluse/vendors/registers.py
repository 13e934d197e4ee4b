"""The common part of the registers of companies: their names, the canonical error codes, and the form of the facts that
every client returns.

An error of a register has a text of ours: an answer may hold personal data, and is never quoted.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeVar

from pydantic import BaseModel, model_validator

from ecluse.base.errors import PermanentError, TransientError, VendorError
from ecluse.vendors.http import VendorHttp

M = TypeVar("M", bound=BaseModel)
Facts = dict[str, Any]  # field of the company card → value; fields without a value are left out


class Part(BaseModel):
    """Part of an answer of a register. Fields that are null count as missing, at every level."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


class Source(StrEnum):
    """The registers, in the order in which they are asked."""

    SEARCH = "API_RECHERCHE_ENTREPRISES"
    INPI = "INPI_RNE"
    RCS = "API_ENTREPRISE_RCS"


class ErrorCode(StrEnum):
    """The canonical error codes."""

    TIMEOUT = "TIMEOUT"
    RATE_LIMIT = "RATE_LIMIT"
    NOT_FOUND = "NOT_FOUND"
    BAD_REQUEST = "BAD_REQUEST"
    UNAUTHORIZED = "UNAUTHORIZED"
    FORBIDDEN = "FORBIDDEN"
    SERVER_ERROR = "SERVER_ERROR"
    NETWORK_ERROR = "NETWORK_ERROR"
    INVALID_RESPONSE = "INVALID_RESPONSE"
    CORE_IDENTITY_MISSING = "CORE_IDENTITY_MISSING"
    UNKNOWN = "UNKNOWN"


RETRYABLE = frozenset({ErrorCode.TIMEOUT, ErrorCode.RATE_LIMIT, ErrorCode.SERVER_ERROR, ErrorCode.NETWORK_ERROR})
BY_STATUS = {
    401: ErrorCode.UNAUTHORIZED,
    403: ErrorCode.FORBIDDEN,
    404: ErrorCode.NOT_FOUND,
    408: ErrorCode.TIMEOUT,
    429: ErrorCode.RATE_LIMIT,
    503: ErrorCode.TIMEOUT,
    504: ErrorCode.TIMEOUT,
}
BY_CODE = {  # of vendors/http.py, for calls without a status
    "TIMEOUT": ErrorCode.TIMEOUT,
    "VENDOR_UNREACHABLE": ErrorCode.NETWORK_ERROR,
    "VENDOR_DISCONNECTED": ErrorCode.NETWORK_ERROR,
    "BAD_ANSWER": ErrorCode.INVALID_RESPONSE,
    "ANSWER_TOO_LARGE": ErrorCode.INVALID_RESPONSE,
}
MESSAGES = {
    ErrorCode.TIMEOUT: "request timed out",
    ErrorCode.RATE_LIMIT: "too many requests",
    ErrorCode.NOT_FOUND: "the register does not have this company",
    ErrorCode.BAD_REQUEST: "the register refused the request",
    ErrorCode.UNAUTHORIZED: "the register does not accept the credentials: check {knobs}",
    ErrorCode.FORBIDDEN: "the credentials lack a right at the register: check {knobs}",
    ErrorCode.SERVER_ERROR: "the register failed",
    ErrorCode.NETWORK_ERROR: "no connection to the register",
    ErrorCode.INVALID_RESPONSE: "the answer is not that of the register: {why}",
    ErrorCode.UNKNOWN: "the call failed",
}


def canonical(source: Source, status: int | None, code: str) -> ErrorCode:
    """Return the canonical code of a failed call: by its HTTP status, else by the code of the HTTP client."""
    if status is None:
        return BY_CODE.get(code, ErrorCode.UNKNOWN)
    if status == 409 and source is Source.RCS:  # the same request is under way for this token: to be repeated later
        return ErrorCode.RATE_LIMIT
    if 300 <= status < 400:
        return ErrorCode.INVALID_RESPONSE
    return BY_STATUS.get(status, ErrorCode.SERVER_ERROR if status >= 500 else ErrorCode.BAD_REQUEST)


def text_of(code: ErrorCode, status: int | None) -> str:
    """Return the text of a failed call: the code TIMEOUT also stands for an answer 503, which is no timeout."""
    return "the register is unavailable" if (code, status) == (ErrorCode.TIMEOUT, 503) else MESSAGES[code]


def refused(
    source: Source,
    code: ErrorCode,
    status: int | None,
    *,
    knobs: str = "",
    why: str = "unreadable",
    retry_after: float | None = None,
) -> VendorError:
    """Return the error of a register for a canonical code: transient if the code is in RETRYABLE, else permanent.
    `knobs`: the settings with the credentials; `why`: what is wrong with an answer; `retry_after`: seconds."""
    message = f"{source}: {text_of(code, status).format(knobs=knobs, why=why)}"
    error: VendorError
    if code in RETRYABLE:
        error = TransientError(message, code=code, retry_after=retry_after, ambiguous=False)
    else:
        error = PermanentError(message, code=code)
    error.status = status
    return error


class Register:
    """Client of one register, which calls it and classifies its failures. `knobs` names the settings with its
    credentials; a Retry-After of more than `longest_wait` seconds is ignored."""

    source: Source
    knobs = ""

    def __init__(self, http: VendorHttp, *, longest_wait: float = 120.0) -> None:
        self.http = http
        self._longest_wait = longest_wait

    async def facts(self, siren: str) -> Facts:
        """Return the facts that the register has about a company; raise a VendorError with a canonical code if the call
        fails or the register does not know the company."""
        raise NotImplementedError

    async def ask(self, method: str, path: str, model: type[M], **given: Any) -> M:
        """Call the register; raise a VendorError with a canonical code if it fails."""
        try:
            return await self.http.call(method, path, model, **given)
        except VendorError as error:
            code = canonical(self.source, error.status, error.code)
            asked = error.retry_after if isinstance(error, TransientError) else None
            wait = asked if asked is not None and asked <= self._longest_wait else None
            # The text of the HTTP client quotes the answer: neither it nor its traceback goes on.
            raise refused(self.source, code, error.status, knobs=self.knobs, retry_after=wait) from None

    def of(self, siren: str, answered: str | None, facts: Facts) -> Facts:
        """Return the facts that have a value. Raise INVALID_RESPONSE if `answered`, the number in the answer, is not
        the `siren` asked for."""
        if answered != siren:
            raise refused(self.source, ErrorCode.INVALID_RESPONSE, 200, why="it is about another company")
        return {name: value for name, value in facts.items() if value not in (None, "", [], {})}


def joined(*parts: str | None) -> str | None:
    """Join the parts of an address or a name that are not blank; None if all are."""
    return " ".join(part.strip() for part in parts if part and part.strip()) or None


def person(
    *,
    last_name: str | None,
    first_names: str | None,
    role: str | None,
    born: str | None,
    nationality: str | None = None,
) -> Facts:
    """Return the facts about a director who is a natural person; `born` is a month or a year."""
    return {
        "type": "person",
        "last_name": last_name,
        "first_names": first_names,
        "role": role,
        "born": born,
        "nationality": nationality,
    }


def organisation(*, name: str | None, siren: str | None, role: str | None) -> Facts:
    """Return the facts about a director that is a company."""
    return {"type": "organisation", "name": name, "siren": siren, "role": role}
