"""The channels on which an event is sent, and the shortening of large payloads; both depend on the payload alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import structlog
from pydantic_core import to_json, to_jsonable_python

from ecluse.base.text import storable

log = structlog.get_logger(__name__)

NAME = re.compile(r"[-a-zA-Z0-9_=@,.;]{1,200}")
PRIVATE = "private-"
WHOLE_TENANT = "*"  # subscribes to all events of the tenant; not a valid channel name, so it cannot collide

Kind = Literal["fiche", "job", "run"]
KINDS: Mapping[str, Kind] = {"job_id": "job", "fiche_id": "fiche", "run_id": "run"}

# Maximum length of lists and of texts, step by step: each step cuts more, until the payload fits.
CUTS = ((100, 2_000), (20, 500), (5, 100), (1, 40), (0, 0))
CORRELATION = frozenset({"id", "status", "state", "event", "event_type", "event_key", "aggregate", "correlation_id"})


class Subject(NamedTuple):
    """The record that a channel is about."""

    kind: Kind
    id: str


def channels_of(payload: Mapping[str, Any], private: bool) -> list[str]:
    """Return the channels of an event with this payload; empty if it names no record that has a channel."""
    return [name for key, kind in KINDS.items() if (name := _name(kind, payload.get(key), private)) is not None]


def subject_of(channel: str) -> Subject | None:
    """Return the record that a channel is about, by its name with or without the prefix; None if the name is not that
    of a channel of Ecluse's own events."""
    kind, _, rest = channel.removeprefix(PRIVATE).partition("-")
    if not NAME.fullmatch(channel) or not rest:
        return None
    return next((Subject(known, rest) for known in KINDS.values() if known == kind), None)


def channel_name(subject: Subject, private: bool) -> str:
    """Return the channel about this record; `private` adds the prefix of private channels."""
    return f"{PRIVATE if private else ''}{subject.kind}-{subject.id}"


def _name(kind: Kind, id_: Any, private: bool) -> str | None:
    """Return the channel about the record with this id; None if there is no usable id. An id that makes no valid name
    is logged."""
    if isinstance(id_, bool) or not isinstance(id_, str | int) or id_ == "":
        return None
    name = channel_name(Subject(kind, str(id_)), private)
    if NAME.fullmatch(name):
        return name
    log.warning("realtime: not a valid channel name, event not sent there", channel=storable(name, 250))
    return None


def encoded(payload: Any) -> bytes:
    """Encode a payload as JSON; values of unknown types become text. Raise ValueError for invalid UTF-8, cycles, and
    values nested too deeply."""
    return to_json(payload, inf_nan_mode="null", fallback=str)


def fit(payload: Mapping[str, Any], limit: int) -> bytes:
    """Encode a payload as a JSON object of at most `limit` bytes (at least 18). If it does not fit, values are
    shortened, then left out; values that identify the event (ids, statuses, numbers) are left out last. Fields that
    cannot be encoded are left out. A payload that lost something has `truncated`: true."""
    try:
        whole = encoded(payload)
    except ValueError:  # invalid UTF-8, nested too deeply, or a cycle
        payload = {name: value for name, value in payload.items() if _is_encodable(name, value)}
    else:
        if len(whole) <= limit:
            return whole
    return encoded(_shrunk(to_jsonable_python(payload, inf_nan_mode="null", fallback=str), limit))


def _is_encodable(name: str, value: Any) -> bool:
    """Return True if this field of a payload can be encoded as JSON."""
    try:
        encoded({name: value})
    except ValueError:
        return False
    return True


def _shrunk(payload: dict[str, Any], limit: int) -> dict[str, Any]:
    """Return the payload with values shortened, and then left out, until it fits into `limit` bytes; marked
    `truncated`."""
    kept = {name: value for name, value in payload.items() if name != "truncated"}
    for most, longest in CUTS:
        kept = {n: v if _correlates(n, v) else _cut(v, most, longest) for n, v in kept.items()}
        if len(encoded(kept)) + len(b',"truncated":true') <= limit:
            return {**kept, "truncated": True}
    left = limit - len(b'{"truncated":true}')
    result: dict[str, Any] = {}
    for name, value in _by_worth(kept):
        cost = len(encoded({name: value})) - len(b"{}") + len(b",")
        if cost <= left:
            result[name], left = value, left - cost
    return {**result, "truncated": True}


def _by_worth(payload: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a payload by importance: those that identify the event first, then the others; short ones
    before long ones in each group."""
    return iter(sorted(payload.items(), key=lambda pair: (not _correlates(*pair), len(encoded(pair[1])))))


def _correlates(name: str, value: Any) -> bool:
    """Return True if this field identifies the event, or is a number, a flag or null."""
    if isinstance(value, str):
        return name in CORRELATION or name.endswith("_id")
    return value is None or isinstance(value, int | float)  # counts and flags


def _cut(value: Any, most: int, longest: int) -> Any:
    """Return the value with lists and objects of at most `most` entries, and texts cut to `longest` characters and an
    ellipsis. Fields that identify the event are not cut."""
    match value:
        case str() as text if len(text) > longest:
            return text[:longest] + "…"
        case list() as values:
            return [_cut(one, most, longest) for one in values[:most]]
        case dict() as pairs:
            return {n: v if _correlates(n, v) else _cut(v, most, longest) for n, v in list(pairs.items())[:most]}
    return value
