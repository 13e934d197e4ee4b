"""JSON encoding and parsing for requests and answers. Values larger than LARGE are handled in a thread, one at a time
per tenant, so that no request blocks the event loop, which all requests and the engine share. An answer has a maximum
number of bytes."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from fastapi import Request, Response

from ecluse.access.envelope import JSON, Refused, as_bytes
from ecluse.access.limits import KNOB, MEGABYTE, Limiter

T = TypeVar("T")
LARGE = 64_000  # bytes
THREAD = ThreadPoolExecutor(1, "json")  # one: each more would compete with the loop for the interpreter


class Encoded(bytes):
    """A field of an answer that is JSON already, such as a large document of the database: to parse or to encode it
    takes one call, during which no thread gets the interpreter."""


async def in_thread(request: Request, work: Callable[[], T]) -> T:
    """Run `work`, a part of a request, in the JSON thread and return its result. Parts of the same tenant run one after
    the other; raise Busy if one waits longer than LARGE_SECONDS for its turn."""
    limiter: Limiter = request.app.state.limits
    async with limiter.large.held(request.state.caller.tenant):
        return await asyncio.get_running_loop().run_in_executor(THREAD, work)


async def encoded(request: Request, value: Any) -> bytes:
    """Return the value as JSON; raise Refused (ANSWER_TOO_LARGE) if it has more megabytes than an answer may have."""
    most = request.app.state.limits.allowed.answer_megabytes * MEGABYTE
    pieces, body = _pieces(value), bytearray()
    for piece in pieces:
        body += piece
        if len(body) > LARGE:
            await in_thread(request, partial(_rest, pieces, body, most))
    return bytes(body)


async def answer(request: Request, value: Any) -> Response:
    return Response(await encoded(request, value), media_type=JSON)


async def compressed(request: Request, answer: Response) -> None:
    """Compress the body of `answer` with gzip, in place, if it is larger than LARGE and the caller accepts gzip.
    Smaller answers are left to the middleware."""
    if len(answer.body) > LARGE and "gzip" in request.headers.get("accept-encoding", ""):
        answer.body = await in_thread(request, lambda: gzip.compress(answer.body, 5))
        answer.headers.update({"Content-Encoding": "gzip", "Content-Length": str(len(answer.body))})
        answer.headers.add_vary_header("Accept-Encoding")


def _pieces(value: Any) -> Iterator[bytes]:
    """Yield the JSON of a value in pieces, field by field and row by row, so that a large value is recognised before
    all of it is encoded."""
    if not isinstance(value, Mapping) or not value:
        yield as_bytes(value)
        return
    for n, (name, field) in enumerate(value.items()):
        yield (b"," if n else b"{") + as_bytes(name) + b":"
        if isinstance(field, Encoded):
            yield field
        elif isinstance(field, list) and field:
            for place, one in enumerate(field):
                yield (b"," if place else b"[") + as_bytes(one)
            yield b"]"
        else:
            yield as_bytes(field)
    yield b"}"


def _rest(pieces: Iterator[bytes], body: bytearray, most: int) -> None:
    for piece in pieces:
        body += piece
        if most and len(body) > most:
            raise Refused(
                422,
                "ANSWER_TOO_LARGE",
                f"The answer has more than {most // MEGABYTE} MB: ask for fewer rows (limit), narrow the filters, or "
                f"raise {KNOB}ANSWER_MEGABYTES.",
            )
