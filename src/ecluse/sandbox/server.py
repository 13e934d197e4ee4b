"""The sandbox's HTTP server: records each call, checks the caps, picks the fault, lets the vendor answer.

It uses aiohttp's low-level server (one handler, no router, no middleware) for speed, and never lets a client's
hang-up cancel the handling of its call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from aiohttp import web

from ecluse.sandbox.control import control
from ecluse.sandbox.limits import Bucket, Refusal
from ecluse.sandbox.state import Sandbox
from ecluse.sandbox.vendor import Answer, Call, Vendor, error_answer
from ecluse.sandbox.wire import asked_to_wait, respond, response_of, throttled

SHUTDOWN_GRACE = 0.1  # seconds; aiohttp waits up to twice this


class Elsewhere:
    """Stand-in vendor for paths at which no vendor is mounted, so that misdirected calls are in the ledger, too."""

    def __init__(self, seed: int) -> None: ...

    def ref(self, call: Call) -> str | None:  # noqa: ARG002
        return None

    def error(self, status: int, code: str, message: str) -> Answer:
        return error_answer(status, code, message)

    def handle(self, call: Call) -> Answer:
        return self.error(404, "not_found", f"no vendor is mounted at {call.request.path}")


ELSEWHERE: tuple[str, Vendor] = ("unknown", Elsewhere(0))


async def serve(
    host: str,
    port: int,
    seed: int,
    faults: list[dict[str, object]] | None = None,
    ready: Callable[[int], None] | None = None,
) -> None:
    """Run a sandbox until cancelled, with these fault rules from the start; ``ready`` is called with the port once it
    listens. Raise RuleError if a rule is invalid, OSError if the port is in use."""
    sandbox = Sandbox(seed, faults or [])

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        mount = request.path.split("/", 2)[1]
        if mount == "_sandbox":
            return response_of(await control(sandbox, request))
        name, vendor = sandbox.mounts.get(mount, ELSEWHERE)
        return await handle_call(sandbox, request, name, vendor, request.path.removeprefix(f"/{mount}"))

    runner = web.ServerRunner(
        web.Server(handle, handler_cancellation=False, access_log=None), shutdown_timeout=SHUTDOWN_GRACE
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, backlog=1024)
        await site.start()
        if ready is not None:
            ready(site.port)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


async def handle_call(
    sandbox: Sandbox, request: web.BaseRequest, name: str, vendor: Vendor, path: str
) -> web.StreamResponse:
    """Handle a call to a vendor, from its entry in the ledger through caps and faults to its answer; `path` is below
    the vendor's mount point."""
    headers, ledger, limits = request.headers, sandbox.ledger, sandbox.limits
    entry = ledger.open(name, request.method, request.raw_path, headers.get("Idempotency-Key"), headers.get("X-Client"))
    call = Call(request, ledger, entry, path)
    held: list[Bucket] = []
    try:
        if request.body_exists:
            call.body = await request.content.read()
        entry.ref = vendor.ref(call)
        entered = limits.enter(name, headers, time.monotonic())
        if isinstance(entered, Refusal):
            entry.fault = "cap"
            response: web.StreamResponse = response_of(
                throttled(vendor.error, entered.retry_after, concurrency=entered.concurrency)
            )
        else:
            held = entered
            rule, latency = sandbox.faults.pick(name, request.method, call.subject)
            entry.fault = rule.kind if rule is not None else None
            response = await respond(request, rule, latency, vendor.error, lambda: vendor.handle(call))
        if request.transport is not None and not request.transport.is_closing():
            entry.status = response.status
            entry.retry_after = asked_to_wait(response.headers.get("Retry-After"))
    except ConnectionError:  # the client disconnected during its request or our answer
        response = web.Response()
    finally:
        limits.leave(held)
        ledger.close(entry)
    return response
