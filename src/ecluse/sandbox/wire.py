"""Sending of an answer, or of a fault in its place, on the socket.

A refusal (429, 401, a reset…) is sent before anything is applied. With every other fault, the vendor applies the call,
and then the answer is spoiled. Latency is added after the call was applied, so that a write takes effect even if the
client hangs up meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import struct
import time
from collections.abc import Callable
from email.utils import formatdate, parsedate_to_datetime

from aiohttp import web

from ecluse.sandbox.chat import SPOILED, spoil
from ecluse.sandbox.faults import Rule
from ecluse.sandbox.vendor import Answer, json_answer

HANGUP_CHECK = 0.1  # seconds
HUGE_CHUNK = b"x" * 65_536
Error = Callable[[int, str, str], Answer]  # builds a refusal in a vendor's format
LINGER_ZERO = struct.pack("ii", 1, 0)


def throttled(error: Error, retry_after: object, *, concurrency: bool) -> Answer:
    """Return a 429 in the vendor's format: for too many calls at once if `concurrency`, else for calls that come too
    fast."""
    if concurrency:
        answer = error(429, "concurrency", "too many requests at once")
    else:
        answer = error(429, "rate_limited", "too many requests")
    if retry_after is not None:
        answer.headers["Retry-After"] = str(retry_after)
    return answer


def asked_to_wait(header: str | None) -> float | None:
    """Return the seconds of a Retry-After header; None if there is no header, or it cannot be parsed."""
    if header is None:
        return None
    try:
        return float(header) if header[:1].isdigit() else parsedate_to_datetime(header).timestamp() - time.time()
    except ValueError:
        return None


def throttle(rule: Rule, error: Error) -> Answer:
    """Return the answer of a rule of kind `throttle`."""
    retry_after = rule.details["retry_after"]
    if retry_after == "date":
        retry_after = formatdate(math.ceil(time.time() + rule.details["seconds"]), usegmt=True)
    return throttled(error, retry_after, concurrency=rule.details["concurrency"])


def server_error(rule: Rule, error: Error) -> Answer:
    """Return a refusal with the status of the rule, which is of kind `server_error` or `applied_then_error`."""
    return error(rule.details["status"], "server_error", "something went wrong")


def redirect(rule: Rule, error: Error) -> Answer:
    """Return the answer of a rule of kind `redirect`."""
    answer = error(302, "moved", "this is elsewhere")
    answer.headers["Location"] = rule.details["location"]
    return answer


REFUSALS: dict[str, Callable[[Rule, Error], Answer]] = {
    "throttle": throttle,
    "server_error": server_error,
    "refused": lambda rule, error: error(rule.details["status"], rule.details["code"], "a rule of the sandbox"),
    "not_found": lambda _, error: error(404, "not_found", "no such record"),
    "unauthorized": lambda _, error: error(401, "unauthorized", "the key is not valid"),
    "redirect": redirect,
    "timeout": lambda *_: Answer(503, b""),
    "reset": lambda *_: Answer(503, b""),
}

REWRITES: dict[str, Callable[[Answer], Answer]] = {
    "invalid_json": lambda answer: Answer(answer.status, answer.body[: len(answer.body) // 2]),
    "wrong_shape": lambda answer: json_answer(["unexpected", {"shape": None}], answer.status),
    "nul_byte": lambda answer: Answer(answer.status, tainted(answer.body, "\0")),
    "bad_unicode": lambda answer: Answer(answer.status, tainted(answer.body, "\ud800")),
}


def tainted(body: bytes, mark: str) -> bytes:
    """Return the JSON body with the mark inserted into its longest text, which is most likely free text and not an id.
    A body without texts is replaced by one with a marked text."""
    value = json.loads(body)
    target = max(texts(value), key=len, default=None)
    if target is None:
        return json.dumps({"text": f"a{mark}b"}).encode()
    return json.dumps(marked(value, target, target[:1] + mark + target[1:])).encode()


def texts(value: object) -> list[str]:
    """Return all texts inside a JSON value."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for item in inner for text in texts(item)]


def marked(value: object, target: str, replacement: str) -> object:
    """Return the JSON value with each text that equals `target` replaced."""
    if isinstance(value, dict):
        return {name: marked(item, target, replacement) for name, item in value.items()}
    if isinstance(value, list):
        return [marked(item, target, replacement) for item in value]
    return replacement if value == target else value


async def respond(
    request: web.BaseRequest, rule: Rule | None, latency: float, error: Error, apply: Callable[[], Answer]
) -> web.StreamResponse:
    """Answer a call, with the fault that `rule` describes, and return the response. `latency`: seconds to wait before
    the answer; without a rule there is none. `error` builds a refusal in the vendor's format; `apply` lets the vendor
    apply the call and returns its answer."""
    if rule is None:
        return response_of(apply())
    kind = rule.kind
    answer = REFUSALS[kind](rule, error) if kind in REFUSALS else apply()
    if kind in REWRITES:
        answer = REWRITES[kind](answer)
    elif kind in SPOILED:
        answer = spoil(kind, answer)
    elif kind == "applied_then_error":
        answer = server_error(rule, error)
    if latency:
        await asyncio.sleep(latency)
    match kind:
        case "timeout":
            await hold(request, rule.details["seconds"])
        case "reset" | "applied_then_reset":
            reset(request)
        case "slow_body":
            return await slow_body(request, answer, rule.details["chunk"], rule.details["delay"])
        case "truncated":
            return await truncated(request, answer)
        case "huge_body":
            return await huge_body(request, answer, rule.details["bytes"])
    return response_of(answer)


def response_of(answer: Answer) -> web.Response:
    """Return the HTTP response for an answer; its content type is JSON unless the answer has another."""
    return web.Response(
        status=answer.status, body=answer.body, headers={"Content-Type": "application/json", **answer.headers}
    )


async def hold(request: web.BaseRequest, seconds: float) -> None:
    """Keep the connection open without an answer for these seconds, or until the client hangs up; then close it."""
    deadline = time.monotonic() + seconds
    # aiohttp shows a hang-up only by the missing transport, hence the polling.
    while request.transport is not None and (left := deadline - time.monotonic()) > 0:  # noqa: ASYNC110
        await asyncio.sleep(min(left, HANGUP_CHECK))
    if request.transport is not None:
        request.transport.close()


def reset(request: web.BaseRequest) -> None:
    """Close the connection with a TCP reset."""
    if request.transport is not None:
        request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_ZERO)
        request.transport.abort()


async def headers_of(request: web.BaseRequest, answer: Answer, length: int) -> web.StreamResponse:
    """Send the headers of an answer with a body of this length, and return the response to write the body to."""
    response = web.StreamResponse(status=answer.status, headers={"Content-Type": "application/json", **answer.headers})
    response.content_length = length
    await response.prepare(request)
    return response


async def slow_body(request: web.BaseRequest, answer: Answer, chunk: int, delay: float) -> web.StreamResponse:
    """Send the body in chunks of this many bytes, with a delay before each."""
    response = await headers_of(request, answer, len(answer.body))
    for start in range(0, len(answer.body), chunk):
        await asyncio.sleep(delay)
        await response.write(answer.body[start : start + chunk])
    return response


async def truncated(request: web.BaseRequest, answer: Answer) -> web.StreamResponse:
    """Send half of the body, then close the connection."""
    response = await headers_of(request, answer, len(answer.body))
    await response.write(answer.body[: len(answer.body) // 2])
    response.force_close()  # aiohttp sends what was written, then closes the connection
    return response


async def huge_body(request: web.BaseRequest, answer: Answer, length: int) -> web.StreamResponse:
    """Send a valid JSON body of this length instead of the answer."""
    response = await headers_of(request, answer, length)
    start, end = b'{"padding":"', b'"}'
    await response.write(start)
    left = length - len(start) - len(end)
    while left > 0:
        await response.write(HUGE_CHUNK[:left])
        left -= len(HUGE_CHUNK)
    await response.write(end)
    return response
