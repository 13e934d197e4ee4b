"""HTTP client for vendors: one request per call, within a deadline, that returns a model or raises a `VendorError`.

Text of an answer can be stored in PostgreSQL as it is: an answer with a lone surrogate or invalid UTF-8 is BAD_ANSWER,
and an escaped NUL is replaced by U+FFFD.

A failure is classified by whether the request may have reached the vendor. If it was never sent it is a `NotSentError`;
once it was sent, only a refusal by the vendor proves that nothing was done.

The keys of the client (`hide`) are removed from every answer and error; error messages also lack text that looks like
another secret.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import IO, Self, TypeVar

import aiohttp
from aiohttp import (
    ClientError,
    ClientHandlerType,
    ClientRequest,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    FormData,
    hdrs,
)
from aiohttp.abc import AbstractResolver
from aiohttp.payload import IOBasePayload
from pydantic import BaseModel, ValidationError
from pydantic_core import to_json
from yarl import URL

from ecluse.base.errors import NotSentError, PermanentError, TransientError, VendorError
from ecluse.base.masking import masked
from ecluse.base.retry_after import parse_retry_after
from ecluse.base.text import storable
from ecluse.base.turnstile import Turnstile
from ecluse.base.validation import problem
from ecluse.vendors.hiding import HiddenKeys

M = TypeVar("M", bound=BaseModel)

EXCERPT = 300  # characters
LARGEST_REFUSAL = 65_536  # bytes read of an answer that is not a success
JSON = {"Content-Type": "application/json"}
A_PASS = 4  # calls that are encoded or decoded in one pass of the event loop: more would delay API requests
REFUSALS = {401: "UNAUTHORIZED", 403: "FORBIDDEN", 404: "NOT_FOUND", 409: "CONFLICT", 412: "PRECONDITION_FAILED"}
WORTH_REPEATING = {408, 425}
NUL = re.compile(rb"(?<!\\)((?:\\\\)*)\\u0000")  # after an even number of backslashes

Explain = Callable[[VendorError, bytes], VendorError]


@dataclass(frozen=True, slots=True)
class FilePart:
    """A file in a multipart form, sent from its position on; the caller closes `content`."""

    name: str
    content_type: str
    content: IO[bytes]


class Kept(IOBasePayload):
    """Payload of a file that the caller closes. aiohttp itself would close it in a thread, at any time after the
    call."""

    def _close(self) -> None:
        self._consumed = True


class Sending:
    """Client middleware around one request: it prevents aiohttp's own retry, and records whether the request was
    sent."""

    __slots__ = ("_request",)

    def __init__(self) -> None:
        self._request: ClientRequest | None = None

    @property
    def sent(self) -> bool:
        """True once the request may have reached the vendor."""
        # aiohttp creates the response object in the same loop step in which it starts to write the request.
        return self._request is not None and self._request.response is not None

    async def __call__(self, request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
        self._request = request
        try:
            return await handler(request)
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as exc:
            # On these two errors, aiohttp would silently retry an idempotent request.
            raise ClientError from exc


class VendorHttp:
    """HTTP client of one vendor, named `name` in messages. May be created outside an event loop; bound to the loop of
    its first call. Deadlines are in seconds, for a whole call and for connecting; a body of more than `largest_body`
    bytes is refused; `resolver` looks up host names (see `GuardedHttp.resolver`); `now` is the clock for Retry-After
    dates."""

    def __init__(
        self,
        name: str,
        base_url: str,
        *,
        deadline: float = 30.0,
        connect_deadline: float = 5.0,
        largest_body: int = 10_000_000,
        connections: int = 200,
        headers: Mapping[str, str] | None = None,
        resolver: AbstractResolver | None = None,
        now: Callable[[], datetime],
    ) -> None:
        self.name = name
        self._base_url = base_url.rstrip("/")
        self._deadline = deadline
        self._connect_deadline = connect_deadline
        self._largest_body = largest_body
        self._connections = connections
        self._headers = headers
        self._resolver = resolver
        self._hidden = HiddenKeys()
        self._now = now
        self._session: ClientSession | None = None
        self._turnstile = Turnstile(A_PASS)

    def hide(self, key: str | None) -> None:
        """Remove this key from all answers and errors from now on; None and very short keys are ignored."""
        self._hidden.add(key)

    def said(self, text: str) -> str:
        """Return a text of the vendor without secrets, so that messages may quote it."""
        return self._hidden.in_text(text)

    async def call(
        self,
        method: str,
        path: str,
        model: type[M],
        *,
        query: Mapping[str, str | int] | None = None,
        json: BaseModel | Mapping[str, object] | None = None,
        form: Mapping[str, str | FilePart] | None = None,
        headers: Mapping[str, str] | None = None,
        deadline: float | None = None,
        explain: Explain | None = None,
    ) -> M:
        """Send one request and return its answer as `model`; raise a `VendorError` if it fails. `path` starts with a
        slash, has its data quoted, and appears in messages; the query does not. A form is sent as multipart.
        `deadline`, in seconds, replaces the client's. `explain` may replace the error of a refusal by one that
        interprets this vendor's codes."""
        deadline = self._deadline if deadline is None else deadline
        session = self._session or self._open()
        await self._turnstile.go_through()
        body: bytes | FormData | None = multipart(form) if form is not None else None
        if json is not None:
            body = json.model_dump_json().encode() if isinstance(json, BaseModel) else to_json(json)
            headers = {**JSON, **headers} if headers else JSON
        subject = f"{self.name} {method} {path}"
        sending = Sending()
        response: ClientResponse | None = None
        answer, whole = bytearray(), False
        try:
            async with asyncio.timeout(deadline):
                response = await session.request(
                    method,
                    URL(self._base_url + path),
                    params=query,
                    data=body,
                    headers=headers,
                    allow_redirects=False,
                    middlewares=(sending,),
                )
                succeeded = 200 <= response.status < 300
                largest = self._largest_body if succeeded else LARGEST_REFUSAL
                while len(answer) <= largest and (chunk := await response.content.readany()):
                    answer += chunk
                whole = len(answer) <= largest
        except (ClientError, TimeoutError) as exc:
            # A refusal is definite once its status is known, even if reading its body fails.
            if response is None or succeeded:
                raise failure(subject, exc, sending.sent, deadline) from exc
        finally:
            if response is not None:
                response.release()  # reuses the connection only if the answer was read to its end
        await self._turnstile.go_through()
        # Before anything is cut off: half a key is a secret, too.
        answer = self._hidden.in_answer(answer, cut_off=not whole)
        if not succeeded:
            error = refusal(subject, response.status, response.headers, answer, self._now())
            error = error if explain is None else explain(error, bytes(answer))
            raise error.explained(self._hidden.removed(error.message))
        if len(answer) > largest:
            message = f"{subject}: the answer is larger than {largest} bytes"
            raise PermanentError(message, code="ANSWER_TOO_LARGE", ambiguous=True)
        if b"\\u0000" in answer:  # one scan of the whole answer: checking each text is expensive
            answer = bytearray(NUL.sub(rb"\1\\ufffd", answer))
        try:
            return model.model_validate_json(answer, strict=True)
        except ValidationError as exc:
            raise unreadable(subject, exc, self.said(excerpt(answer))) from exc

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the client for good: a later call is a bug and raises."""
        if self._session is not None:
            await self._session.close()

    def _open(self) -> ClientSession:
        """Open the session, on the running loop."""
        self._session = ClientSession(
            connector=aiohttp.TCPConnector(limit=self._connections, resolver=self._resolver),
            # `call` enforces the total deadline, which includes waiting for a free connection; the connect deadline
            # does not.
            timeout=ClientTimeout(total=None, sock_connect=self._connect_deadline, ceil_threshold=math.inf),
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            raise_for_status=False,
            trust_env=False,
        )
        return self._session


def refusal(
    subject: str, status: int, headers: Mapping[str, str], answer: bytes | bytearray, now: datetime
) -> VendorError:
    """Return the error for an answer with this status (not 2xx): transient for 408, 425, 429 and 5xx, else permanent.
    `subject` names the request in the message; `now` is used if Retry-After is a date and the answer has no Date
    header."""
    error = _refusal(subject, status, headers, answer, now)
    error.status = status
    return error


def _refusal(
    subject: str, status: int, headers: Mapping[str, str], answer: bytes | bytearray, now: datetime
) -> VendorError:
    message = storable(f"{subject}: {status} {masked(excerpt(answer))}")
    if 300 <= status < 400:
        return PermanentError(message, code="VENDOR_REDIRECT", ambiguous=True)
    if status != 429 and 400 <= status < 500 and status not in WORTH_REPEATING:
        # 412 is ambiguous: an earlier attempt of the same write may have changed the record.
        return PermanentError(message, code=REFUSALS.get(status, "VENDOR_REFUSED"), ambiguous=status == 412)
    retry_after = asked_to_wait(headers, now)
    if status == 429:
        return TransientError(message, code="THROTTLED", retry_after=retry_after, ambiguous=False)
    return TransientError(message, code=f"VENDOR_ERROR_{status}", retry_after=retry_after)


def asked_to_wait(headers: Mapping[str, str], now: datetime) -> float | None:
    """Return the seconds that the vendor asks to wait; None if it does not. Some vendors send Retry-After-Ms beside or
    instead of Retry-After: it is more precise, so it comes first."""
    milliseconds = headers.get("Retry-After-Ms", "").strip()
    if milliseconds.isascii() and milliseconds.isdigit() and len(milliseconds) < 20:
        return int(milliseconds) / 1000
    return parse_retry_after(headers.get(hdrs.RETRY_AFTER), vendor_clock(headers.get(hdrs.DATE)) or now)


def multipart(form: Mapping[str, str | FilePart]) -> FormData:
    """Return the form as the body of a multipart request."""
    data = FormData(default_to_multipart=True)
    for name, value in form.items():
        if isinstance(value, str):
            data.add_field(name, value)
        else:
            content = Kept(value.content, content_type=value.content_type)
            data.add_field(name, content, filename=value.name, content_type=value.content_type)
    return data


def failure(subject: str, exc: ClientError | TimeoutError, sent: bool, deadline: float) -> TransientError:
    """Return the error for a missing or incomplete answer. `sent`: the request may have reached the vendor; `deadline`:
    that of the call, in seconds. aiohttp's error texts are left out: they may quote the URL, and secrets in it."""
    timed_out, origin = isinstance(exc, TimeoutError), exc.__cause__ or exc
    what = "time-out" if timed_out else getattr(origin, "strerror", None) or type(origin).__name__
    if sent and not timed_out and isinstance(exc, aiohttp.ClientResponseError):
        return TransientError(storable(f"{subject}: the answer is not HTTP: {what}"), code="BAD_ANSWER")
    return no_answer(subject, what, sent=sent, deadline=deadline if timed_out else None)


def no_answer(subject: str, what: str, *, sent: bool, deadline: float | None) -> TransientError:
    """Return the error for a request without an answer: a `NotSentError` unless `sent` (the request may have reached
    the vendor). `subject` and `what` name the request and the cause in the message. `deadline`: the deadline that has
    passed, in seconds; None if the connection failed."""
    if not sent:
        return NotSentError(storable(f"{subject}: not sent: {what}"))
    if deadline is not None:
        return TransientError(storable(f"{subject}: no answer within {deadline:g} s"), code="TIMEOUT")
    return TransientError(storable(f"{subject}: the connection was lost: {what}"), code="VENDOR_DISCONNECTED")


def unreadable(subject: str, exc: ValidationError, said: str) -> TransientError:
    """Return the error for an answer that is not valid for the model; `said` is its beginning."""
    why = first_problem(exc, "the answer")
    return TransientError(storable(f"{subject}: {why}: {said}"), code="BAD_ANSWER")


def first_problem(exc: ValidationError, whole: str = "it") -> str:
    """Return the first problem of a validation error, with its field; `whole` stands for the value as a whole."""
    first = exc.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or whole}: {problem(first)}"


def excerpt(answer: bytes | bytearray) -> str:
    """Return the first EXCERPT characters of an answer as text, for messages."""
    # A character has at most four bytes: cutting first avoids decoding megabytes.
    return storable(answer[: 4 * EXCERPT].decode("utf-8", "replace"), EXCERPT)


def vendor_clock(date: str | None) -> datetime | None:
    """Parse a Date header; None if there is none or it is unreadable."""
    try:
        at = parsedate_to_datetime(date) if date else None
    except (ValueError, OverflowError):
        return None
    return at.replace(tzinfo=UTC) if at is not None and at.tzinfo is None else at
