"""Pages that update themselves: the regions of a page are rendered again after a realtime event, and those that have
changed are sent as a server-sent event, compressed.

A page is rendered at most once a second, and every two seconds while a run is open, because there is no event per item.
A stream ends with its page, so that pages that are not open cause no queries. The key is checked at each rendering.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import psycopg
import structlog
from fastapi import Request, Response
from markupsafe import Markup

from ecluse.access.envelope import Refused, status_of
from ecluse.base.errors import EcluseError
from ecluse.db.outage import is_unavailable, one_line
from ecluse.db.shares import Busy
from ecluse.realtime.channels import WHOLE_TENANT
from ecluse.realtime.hub import Listener, Message
from ecluse.realtime.room import Realtime
from ecluse.realtime.stream import EventStream
from ecluse.web import render
from ecluse.web.authentication import admitted

log = structlog.get_logger(__name__)
END = b"event: end\ndata: \n\n"

# The template variables of a page; `busy`: a run is open, `over`: nothing on the page can change any more.
Context = dict[str, Any]
TITLE = "title"


class Pace(NamedTuple):
    """Seconds between two renderings of a page: `least` is the minimum, `tick` the interval while a run is open,
    `quiet` the interval while none is (short enough that proxies do not close the connection as idle)."""

    least: float = 1.0
    tick: float = 2.0
    quiet: float = 10.0


class RenderingTurns:
    """Limits the rendering of open pages, however many, to half of the event loop's time: one rendering at a time, each
    followed by a pause of the same length. Tenants take turns."""

    def __init__(self) -> None:
        self._all = asyncio.Lock()
        self._of: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def taken(self, tenant: str) -> AsyncGenerator[None]:
        own = self._of.get(tenant) or self._of.setdefault(tenant, asyncio.Lock())
        async with own, self._all:
            began = time.monotonic()
            yield
            await asyncio.sleep(time.monotonic() - began)


class Page(NamedTuple):
    """A page that updates itself: a template and the names of the blocks that are its regions, in display order;
    without names the whole template is one region. The block `title` is the title of the document."""

    template: str
    names: Sequence[str] = ()

    def regions(self, request: Request, *, streamed: bool = False, **context: Any) -> render.Regions:
        return render.regions(request, self.template, self.names, streamed=streamed, **context)


def stream(
    request: Request,
    permission: str,
    page: Page,
    look: Callable[[], Awaitable[Context]],
    concerns: Callable[[Message], bool],
) -> Response:
    realtime: Realtime = request.app.state.realtime
    tenant = request.state.caller.tenant
    if realtime.hub.stopping:
        raise Refused(503, "STOPPING", "This server is stopping: try again.")
    closed = request.app.state.limits.open(request.state.caller, "page_streams")

    async def sent() -> AsyncGenerator[bytes]:
        with realtime.hub.listening(Listener(tenant, "sse")) as listener:
            realtime.hub.subscribe(listener, WHOLE_TENANT)
            try:
                async for part in _renderings(request, permission, page, look, concerns, listener):
                    yield part
            except Busy:  # the tenant's readers are in use, by its other pages perhaps: this one reconnects
                return
            except Refused as refused:
                yield _event(render.fragment(request, "logged_out.html", why=refused.message)) + END
            except (EcluseError, psycopg.Error) as error:  # the stream ends, and the page reconnects
                if not (is_unavailable(error) or (isinstance(error, EcluseError) and status_of(error) is not None)):
                    raise
                log.warning("pages: live update failed, the page reconnects", error=one_line(error))

    squeeze = "gzip" in request.headers.get("accept-encoding", "")
    return EventStream(sent(), realtime.limits.send_within, squeeze=squeeze, closed=closed)


async def _renderings(
    request: Request,
    permission: str,
    page: Page,
    look: Callable[[], Awaitable[Context]],
    concerns: Callable[[Message], bool],
    listener: Listener,
) -> AsyncGenerator[bytes]:
    pace: Pace = request.app.state.page_pace
    turns: RenderingTurns = request.app.state.page_turns
    sent: dict[str, Markup] = {}
    spoke_at = time.monotonic()
    while listener.leave is None:
        await admitted(request, permission)
        shown = await look()
        at = time.monotonic()
        async with turns.taken(request.state.caller.tenant):
            regions = page.regions(request, streamed=True, **shown)
        changed = {name: html for name, html in regions.items() if sent.get(name) != html}
        sent = regions
        if shown["over"]:
            yield _event(_swaps(changed)) + END
            return
        if changed or at - spoke_at >= pace.quiet:
            yield _event(_swaps(changed)) if changed else b": keep-alive\n\n"
            spoke_at = at
        await _until_it_pays(listener, concerns, at, pace.least, pace.tick if shown["busy"] else pace.quiet)


async def _until_it_pays(
    listener: Listener, concerns: Callable[[Message], bool], since: float, least: float, most: float
) -> None:
    """Wait until the page should be rendered again: `most` seconds after `since`, or, once a message concerns the page,
    `least` seconds after it."""
    stale = False
    while listener.leave is None:
        messages = [one[0] for one in listener.taken() if not isinstance(one, str)]
        stale = stale or any(concerns(message) for message in messages)
        left = since + (least if stale else most) - time.monotonic()
        if left <= 0:
            return
        await listener.wait(left)


def _swaps(changed: dict[str, Markup]) -> str:
    """Return markup that swaps each changed region into its place; other regions stay untouched."""
    return "".join(
        f"<title>{html}</title>"
        if name == TITLE
        else f'<hx-partial hx-target="#part-{name}" hx-swap="innerMorph">{html}</hx-partial>'
        for name, html in changed.items()
    )


def said(message: Message, name: str) -> str | None:
    """Return a field of the message's payload as text; None if the payload has no such field or is not an object (which
    external publishers may send)."""
    value = message.payload.get(name) if isinstance(message.payload, dict) else None
    return None if value is None else str(value)


def _event(html: str) -> bytes:
    return b"".join(b"data: %s\n" % line.encode() for line in html.splitlines()) + b"\n"
