"""Rendering of templates, and the formatting of numbers and times in them. All text is escaped; only rendered blocks
and constants of the program are Markup, which is not."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ecluse.access.wire import kit_of
from ecluse.base.text import count_of
from ecluse.engine import STOPPED
from ecluse.web import actions
from ecluse.web.files import address

INSTANT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
NONE = "\N{EN DASH}"
NO_STORE = {"Cache-Control": "no-store"}
WHOLE = "whole"

# The regions of a page by name, in the order in which they are shown.
Regions = dict[str, Markup]


def page(request: Request, template: str, status: int = 200, **context: Any) -> HTMLResponse:
    done = actions.said(request)
    answer = HTMLResponse(fragment(request, template, streamed=False, done=done, **context), status, NO_STORE)
    if done is not None:
        answer.delete_cookie(actions.DONE, path="/ui", httponly=True, samesite="strict")
    return answer


def fragment(request: Request, template: str, *, streamed: bool = True, **context: Any) -> str:
    """Render a template to text. `streamed`: the text updates a page that a browser already shows."""
    return TEMPLATES.get_template(template).render(**_known(request, streamed), **context)


def regions(request: Request, template: str, names: Sequence[str], *, streamed: bool, **context: Any) -> Regions:
    """Render the blocks of a template by name, in this order; without names, render the whole template as one
    region."""
    if not names:
        return {WHOLE: Markup(fragment(request, template, streamed=streamed, **context))}  # noqa: S704 - escaped there
    found = TEMPLATES.get_template(template)
    known = found.new_context({**_known(request, streamed), **context})
    return {name: Markup("".join(found.blocks[name](known))) for name in names}  # noqa: S704 - escaped there


def _known(request: Request, streamed: bool) -> dict[str, Any]:
    """Return the variables that all templates have. A streamed rendering has no `now`: the page itself counts elapsed
    time, otherwise the region would change every second."""
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


def ago(at: datetime, now: datetime) -> Markup:
    """Format an instant, and how long ago it was; the page goes on counting."""
    counted = '{} <small><span class="ticks" data-since="{}">{}</span> ago</small>'
    return Markup(counted).format(instant(at), stamp(at), elapsed(now - at))  # noqa: S704 - a constant


def elapsed(span: timedelta) -> str:
    """Format a span without fractions of a second, exactly as `live.js` does while it counts."""
    seconds = max(0, int(span.total_seconds()))
    return f"{seconds} s" if seconds < 60 else lasted(timedelta(seconds=seconds))


def lasted(span: timedelta | None) -> str:
    """Format a span: `4.2 s`, `3 min 07 s`, `2 h 05 min`, `3 d 04 h`."""
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
    """Describe the end cause of a run that did not end normally. (`operator`: ended by an operator before the state
    `cancelled` existed.)"""
    said = {
        "stale": "stale: took longer than its stages may",
        "catastrophic": STOPPED,
        "operator": "cancelled by an operator",
    }
    return said[cause]


def number(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


def words(name: str) -> str:
    return name.replace("_", " ").capitalize()


def formatted(value: Any) -> Markup | str:
    """Format a value of a JSON answer for a page: None as a dash, booleans as yes or no, integers with separators,
    instants as times, objects and lists as one line of JSON. Markup is returned unchanged."""
    match value:
        case Markup():
            return value
        case None:
            return NONE
        case bool():
            return "yes" if value else "no"
        case int():
            return number(value)
        case str() if INSTANT.fullmatch(value):
            return instant(datetime.fromisoformat(value))
        case datetime():
            return instant(value)
        case str() | float():
            return str(value)
    return as_line(value)


def with_code(text: str) -> Markup:
    """Return the text as markup, with the parts in backticks as code."""
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if n % 2 else part for n, part in enumerate(text.split("`"))
    )


def as_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)


def as_line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def query(given: dict[str, Any], **changed: Any) -> str:
    """Return the query string, with its `?`, of the given parameters with these changes; an empty text if there are
    none. Empty values, 0 and False are left out; True becomes 1."""
    left = {name: value for name, value in {**given, **changed}.items() if value not in (None, "", 0, False)}
    return "?" + urlencode({name: 1 if value is True else value for name, value in left.items()}) if left else ""


def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("ecluse.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,  # not looked for on disk at each use: a new version is a new process
    )
    made.filters |= {"instant": instant, "lasted": lasted, "number": number, "as_json": as_json, "as_line": as_line}
    made.filters |= {
        "stamp": stamp,
        "elapsed": elapsed,
        "how_ended": how_ended,
        "words": words,
        "formatted": formatted,
        "with_code": with_code,
    }
    made.globals |= {"static": address, "query": query, "count_of": count_of, "dash": NONE}
    made.globals["parts"] = made.get_template("parts.html").module  # global: blocks rendered alone need it, too
    return made


TEMPLATES = _environment()
