"""A page that stays true: its regions are rendered again when something happened, and those that have changed are sent
as a server-sent event, compressed.

At most once a second, and every other second while something goes on, because what items do is not told one by one. A
stream lives with its page: what nobody looks at is not asked for. The key is looked at again each time.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import psycopg
import structlog
from fastapi import Request, Response
from markupsafe import Markup

from ecluse.access.envelope import Refused, status_of
from ecluse.base.errors import EcluseError
from ecluse.db.connect import is_away, one_line
from ecluse.realtime.channels import WHOLE_TENANT
from ecluse.realtime.hub import Listener, Message
from ecluse.realtime.room import Realtime
from ecluse.realtime.stream import EventStream
from ecluse.web import render
from ecluse.web.door import admitted

log = structlog.get_logger(__name__)
# Between two renderings: at least, while something goes on, while nothing does (proxies hang up on silence).
LEAST_SECONDS, TICK_SECONDS, QUIET_SECONDS = 1.0, 2.0, 15.0
END = b"event: end\ndata: \n\n"

# What a page shows, by name; `busy`: something goes on, `over`: nothing of it can change any more.
Context = dict[str, Any]
TITLE = "title"


class Page(NamedTuple):
    """A template, and those of its blocks that are its regions, in the order in which they are shown; none: the whole
    template is one. A block `title` is that of the document."""

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
        raise Refused(503, "STOPPING", "This server stops: ask again.")
    if realtime.pusher.full(tenant, "sse"):
        raise Refused(429, "TOO_MANY_CONNECTIONS", "Too many look on for this tenant already.")

    async def told() -> AsyncGenerator[bytes]:
        with realtime.hub.listening(Listener(tenant, "sse")) as listener:
            realtime.hub.subscribe(listener, WHOLE_TENANT)
            try:
                async for part in _renderings(request, permission, page, look, concerns, listener):
                    yield part
            except Refused:
                yield _event(render.fragment(request, "logged_out.html")) + END
            except (EcluseError, psycopg.Error) as error:  # it hangs up, and the page comes back
                if not (is_away(error) or (isinstance(error, EcluseError) and status_of(error) is not None)):
                    raise
                log.warning("a page is not kept up to date", error=one_line(error))

    return EventStream(told(), squeeze="gzip" in request.headers.get("accept-encoding", ""))


async def _renderings(
    request: Request,
    permission: str,
    page: Page,
    look: Callable[[], Awaitable[Context]],
    concerns: Callable[[Message], bool],
    listener: Listener,
) -> AsyncGenerator[bytes]:
    sent: dict[str, Markup] = {}
    spoke_at = time.monotonic()
    while listener.leave is None:
        request.state.caller = await admitted(request, permission)
        shown = await look()
        at, regions = time.monotonic(), page.regions(request, streamed=True, **shown)
        changed = {name: html for name, html in regions.items() if sent.get(name) != html}
        sent = regions
        if shown["over"]:
            yield _event(_swaps(changed)) + END
            return
        if changed or at - spoke_at >= QUIET_SECONDS:
            yield _event(_swaps(changed)) if changed else b": still here\n\n"
            spoke_at = at
        await _until_it_pays(listener, concerns, at, TICK_SECONDS if shown["busy"] else QUIET_SECONDS)


async def _until_it_pays(listener: Listener, concerns: Callable[[Message], bool], since: float, most: float) -> None:
    """To look again: something happened, and not a moment ago; or it is time anyway."""
    stale = False
    while listener.leave is None:
        messages = [one[0] for one in listener.taken() if not isinstance(one, str)]
        stale = stale or any(concerns(message) for message in messages)
        left = since + (LEAST_SECONDS if stale else most) - time.monotonic()
        if left <= 0:
            return
        await listener.wait(left)


def _swaps(changed: dict[str, Markup]) -> str:
    """Each region in its place. What is not shown there is left alone."""
    return "".join(
        f"<title>{html}</title>"
        if name == TITLE
        else f'<hx-partial hx-target="#part-{name}" hx-swap="innerMorph">{html}</hx-partial>'
        for name, html in changed.items()
    )


def said(message: Message, name: str) -> str | None:
    """What its payload has under this name; None: nothing. (Publishers outside may send what is no object.)"""
    value = message.payload.get(name) if isinstance(message.payload, dict) else None
    return None if value is None else str(value)


def _event(html: str) -> bytes:
    return b"".join(b"data: %s\n" % line.encode() for line in html.splitlines()) + b"\n"
