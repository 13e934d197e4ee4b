"""Buttons and messages of the operations that pages offer: the address of an operation's form, and the message that the
next page shows once the operation is done. A button is offered only if the caller's role permits the operation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, urlencode

from fastapi import Request, Response

from ecluse.access.surface import Declared
from ecluse.base.text import count_of
from ecluse.web.action_texts import ACTION_TEXTS, Action
from ecluse.web.job_actions import JOB_ACTIONS

DONE = "ecluse_done"  # cookie with the operation that was done; the page that shows the message deletes it
DONE_SECONDS = 60
PARAMETER = re.compile(r"\{(\w+)(?::path)?\}")
COUNT = re.compile(r"\{(\w+):([^|{}]+)\|([^|{}]+)\}")
LONGEST = 200  # characters of a value in a message


class Button(NamedTuple):
    label: str
    address: str
    grave: bool


class Said(NamedTuple):
    text: str
    link: str


ACTIONS = {**ACTION_TEXTS, **JOB_ACTIONS}


def buttons(request: Request, *wanted: tuple[str, Mapping[str, Any]], back: str = "", **given: Any) -> list[Button]:
    """Return a button for each of these operations, except for operations that this server does not have or that the
    caller's role does not permit. `wanted`: pairs of an operation's name and its path parameters. `back`: the page to
    return to. `given`: initial values of the form's fields."""
    declared: Mapping[str, Declared] = request.app.state.operations
    return [
        Button(ACTIONS[name].label, address(declared[name].path, name, values, back, given), ACTIONS[name].grave)
        for name, values in wanted
        if name in declared and request.state.caller.may(declared[name].permission)
    ]


def address(path: str, name: str, values: Mapping[str, Any], back: str, given: Mapping[str, Any]) -> str:
    place = "".join(f"/{quote(str(values[one]), safe='')}" for one in parameters(path))
    asked = {"back": back, **given}
    query = urlencode({one: value for one, value in asked.items() if value})
    return f"/ui/do/{name}{place}" + (f"?{query}" if query else "")


def parameters(path: str) -> Sequence[str]:
    return PARAMETER.findall(path)


def keep_said(answer: Response, name: str, values: Mapping[str, Any], follows: str) -> None:
    """Store in a cookie, for DONE_SECONDS, that an operation was done: its name and the values of its message, each cut
    after LONGEST characters, but not the message itself. `follows`: the name of the value that is the id of a run, to
    which the message links; empty for none."""
    wanted = {one: values[one] for one in PARAMETER.findall(ACTIONS[name].done) if one in values}
    if follows and follows in values:
        wanted["run"] = values[follows]
    kept = urlencode({"did": name, **{one: str(value)[:LONGEST] for one, value in wanted.items()}})
    answer.set_cookie(DONE, kept, max_age=DONE_SECONDS, path="/ui", httponly=True, samesite="strict")


def said(request: Request) -> Said | None:
    """Return the message about the operation that the previous request has done, from the cookie of `keep_said`; None
    without such a cookie."""
    kept = dict(parse_qsl(request.cookies.get(DONE, "")))
    if (action := ACTIONS.get(kept.get("did", ""))) is None:
        return None
    run = kept.get("run", "")
    link = f"/ui/runs/{run}" if re.fullmatch(r"[1-9][0-9]{0,18}", run) else ""
    return Said(PARAMETER.sub(lambda found: kept.get(found[1], ""), action.done), link)


def titled(action: Action, values: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """Return the heading of a form: the label of the action, the kind of its record, and the record's name (without a
    name, the values of the path), such as `Edit rule 7`. A label of several words ends with a colon before the kind:
    `Change caps: lane crm`."""
    which = record.get("name") or " ".join(values.values())
    label = f"{action.label}:" if action.what and " " in action.label else action.label
    return " ".join(one for one in (label, action.what, which) if one)


def in_words(text: str, values: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """Return `text` with each parameter `{name}` replaced by the value of that name in the path, or by the count of
    that name in the record (such as targets by status). A parameter with neither becomes `No`. `{name:one|many}` is a
    count and its words, for 1 and for other numbers."""
    counts = [one.items() for one in record.values() if isinstance(one, Mapping)]
    known = {**{name: count for one in counts for name, count in one}, **values}

    def counted(found: re.Match[str]) -> str:
        name, one, many = found.groups()
        return count_of(known[name], one, many) if name in known else f"No {many}"

    text = COUNT.sub(counted, text)
    return PARAMETER.sub(lambda found: str(known.get(found[1], "No")), text)
