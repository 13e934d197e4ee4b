"""Templates, and how figures and times are written in them. Everything is escaped; what is markup was made here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ecluse.access.wire import kit_of
from ecluse.engine import STOPPED
from ecluse.web.files import address

NONE = "\N{EN DASH}"
NO_STORE = {"Cache-Control": "no-store"}
WHOLE = "whole"

# What a page is made of, by name, in its order.
Regions = dict[str, Markup]


def page(request: Request, template: str, status: int = 200, **context: Any) -> HTMLResponse:
    return HTMLResponse(fragment(request, template, streamed=False, **context), status, NO_STORE)


def fragment(request: Request, template: str, *, streamed: bool = True, **context: Any) -> str:
    """`streamed`: to a page that is shown already."""
    return TEMPLATES.get_template(template).render(**_known(request, streamed), **context)


def regions(request: Request, template: str, names: Sequence[str], *, streamed: bool, **context: Any) -> Regions:
    """The blocks of a template by name, in this order; without names, all of it as one."""
    if not names:
        return {WHOLE: Markup(fragment(request, template, streamed=streamed, **context))}  # noqa: S704 - escaped there
    found = TEMPLATES.get_template(template)
    known = found.new_context({**_known(request, streamed), **context})
    return {name: Markup("".join(found.blocks[name](known))) for name in names}  # noqa: S704 - escaped there


def _known(request: Request, streamed: bool) -> dict[str, Any]:
    """A stream has no `now`: what only counts time is left to the page, or each second would be sent."""
    now = None if streamed else kit_of(request).clock.now()
    return {"caller": getattr(request.state, "caller", None), "path": request.url.path, "now": now}


def trouble(request: Request, status: int, message: str) -> HTMLResponse:
    said = message[:1].upper() + message[1:]
    return page(request, "trouble.html", status, code=status, message=said if said.endswith(".") else f"{said}.")


def instant(at: datetime | None) -> Markup | str:
    if at is None:
        return NONE
    utc = at.astimezone(UTC)
    return Markup('<time datetime="{}">{}</time>').format(f"{utc:%Y-%m-%dT%H:%M:%SZ}", f"{utc:%Y-%m-%d %H:%M:%S}")


def stamp(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%dT%H:%M:%S}Z"


def elapsed(span: timedelta) -> str:
    """In whole seconds, as `live.js` writes what it counts."""
    seconds = max(0, int(span.total_seconds()))
    return f"{seconds} s" if seconds < 60 else lasted(timedelta(seconds=seconds))


def lasted(span: timedelta | None) -> str:
    """`4.2 s`, `3 min 07 s`, `2 h 05 min`, `3 d 04 h`."""
    if span is None:
        return NONE
    tenths = max(0, round(span.total_seconds() * 10))
    if tenths < 600:
        return f"{tenths / 10:.1f} s"
    minutes, seconds = divmod(tenths // 10, 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24:02d} h"


def how_ended(cause: str) -> str:
    """Of a run that did not come to its end by itself. (One that an operator ended before there was a state for it.)"""
    said = {"stale": "took longer than it may", "catastrophic": STOPPED, "operator": "cancelled by an operator"}
    return said[cause]


def number(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


def as_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)


def as_line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def query(given: dict[str, Any], **changed: Any) -> str:
    """The address's question, with these changes; what says nothing is left out."""
    left = {name: value for name, value in {**given, **changed}.items() if value not in (None, "", 0, False)}
    return "?" + urlencode({name: 1 if value is True else value for name, value in left.items()}) if left else ""


def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("ecluse.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"instant": instant, "lasted": lasted, "number": number, "as_json": as_json, "as_line": as_line}
    made.filters |= {"stamp": stamp, "elapsed": elapsed, "how_ended": how_ended}
    made.globals |= {"static": address, "query": query, "dash": NONE}
    made.globals["parts"] = made.get_template("parts.html").module  # also for blocks that are rendered alone
    return made


TEMPLATES = _environment()
