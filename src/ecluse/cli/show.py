"""Output of commands: tables that fit the terminal, fields as an aligned list, JSON. Without a terminal, nothing is
wrapped or coloured."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

GAP = "  "
NARROWEST = 6  # a column of a table; with less, rows are shown as lists of fields
COLOURS = {
    "32": "completed succeeded successful active ok live delivered done open enabled ready sent",
    "31": "failed fail dead error down undelivered revoked expired",
    "33": "partial cancelled warn warning paused held waiting pending queued disabled ignored skipped stalled",
    "36": "running transcribing auditing fetching delivering",
}
COLOUR = {word: code for code, words in COLOURS.items() for word in words.split()}
STATES = {"status", "state", "outcome", "level", "run_status", "last_status"}
CAMEL = re.compile(r"(?<=[a-z])[A-Z](?=[a-z])")
INSTANT = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d)")


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def write(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def write_text(text: str) -> None:
    """Write text from elsewhere: to a file as it is, to a terminal with its control characters escaped."""
    write("\n".join(harmless(line.removesuffix("\r")) for line in text.split("\n")) if is_terminal() else text)


def write_json(value: Any) -> None:
    write_text(json.dumps(value, ensure_ascii=False, indent=2 if is_terminal() else None))


def is_terminal() -> bool:
    return sys.stdout.isatty()


def width() -> int | None:
    """Return the number of columns of the terminal; None without a terminal."""
    return shutil.get_terminal_size().columns if is_terminal() else None


def has_colour() -> bool:
    return is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def harmless(text: str) -> str:
    """Escape control characters, so that text from elsewhere cannot control the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def cell(value: Any) -> str:
    match value:
        case None | "" | []:
            return "-"
        case dict() if not value:  # the pattern {} matches every dict
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return str(round(value, 4))
        case str() if found := INSTANT.fullmatch(value):
            day, time, zone = found.groups()
            return f"{day} {time}{'Z' if zone in ('Z', '+00:00') else zone}"
        case list() if not any(isinstance(one, dict | list) for one in value):
            return ", ".join(cell(one) for one in value)
        case list() if all(isinstance(one, dict) for one in value):
            return ", ".join(" ".join(dict.fromkeys(cell(part) for part in one.values())) for one in value)
        case dict() | list():
            return harmless(json.dumps(value, ensure_ascii=False))
        case _:
            return harmless(str(value))


def title(name: str) -> str:
    """Return the label of a field: its name in words, without underscores and camelCase. A name in capitals, such as
    the code NO_URL, is returned unchanged."""
    return name if name.isupper() else CAMEL.sub(lambda found: f" {found[0].lower()}", name).replace("_", " ")


def cancelled_apart(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the row in the words of the pages: a cancelled run or target is called so, and not counted as failed."""
    found = dict(row)
    if row.get("state") == "cancelled":
        found["status"] = "cancelled"
    if row.get("outcome") == "failed" and row.get("error_code") == "CANCELLED":
        found["outcome"] = "cancelled"
    if row.get("cancelled") and row.get("failed"):
        found["failed"] = row["failed"] - row["cancelled"]
    return found


def cells_of(text: str) -> int:
    """Return the number of columns that the text takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], fit: int | None, indent: str = "") -> list[str]:
    heads = [title(name) for name in columns]
    body = [[cell(row.get(name)) for name in columns] for row in rows]
    natural = [max(cells_of(line[n]) for line in [heads, *body]) for n in range(len(columns))]
    widths = natural if fit is None else fitted(natural, fit - len(indent) - len(GAP) * (len(columns) - 1))
    if widths is None:
        return [line for row in rows for line in [*fields({n: row.get(n) for n in columns}, fit, indent), ""]][:-1]
    lines = _lines(heads, widths, indent, ["1"] * len(heads))
    for row in body:
        codes = [COLOUR.get(text, "") if name in STATES else "" for name, text in zip(columns, row, strict=True)]
        lines += _lines(row, widths, indent, codes)
    return lines


def fitted(natural: Sequence[int], room: int) -> list[int] | None:
    """Narrow the widest columns until all fit into `room` characters; return the widths, or None if that would need
    columns narrower than NARROWEST."""
    widths = list(natural)
    while (excess := sum(widths) - room) > 0:
        widest = max(widths)
        if widest <= NARROWEST:
            return None
        wide = [n for n, one in enumerate(widths) if one == widest]
        following = max([one for one in widths if one < widest], default=0)
        lower = max(NARROWEST, following, widest - -(-excess // len(wide)))
        for n in wide:
            widths[n] = lower
    return widths


def wrapped(text: str, room: int) -> list[str]:
    """Break the text into lines of at most `room` columns, at spaces or within a word that is longer than a line."""
    lines, line = [], ""
    for word in text.split(" "):
        rest = word
        if line and cells_of(line) + 1 + cells_of(rest) <= room:
            line = f"{line} {rest}"
            continue
        if line:
            lines.append(line)
        while cells_of(rest) > room:
            end = next(n for n in range(len(rest), 0, -1) if cells_of(rest[:n]) <= room or n == 1)
            lines.append(rest[:end])
            rest = rest[end:]
        line = rest
    return [*lines, line]


def _lines(texts: Sequence[str], widths: Sequence[int], indent: str, codes: Sequence[str]) -> list[str]:
    parts = [wrapped(text, room) if cells_of(text) > room else [text] for text, room in zip(texts, widths, strict=True)]
    found = []
    for n in range(max(len(one) for one in parts)):
        line = []
        for texts_of, room, code in zip(parts, widths, codes, strict=True):
            text = texts_of[n] if n < len(texts_of) else ""
            pad = " " * (room - cells_of(text))
            line.append((f"\x1b[{code}m{text}\x1b[0m" if code and text and has_colour() else text) + pad)
        found.append((indent + GAP.join(line)).rstrip())
    return found


def fields(row: Mapping[str, Any], fit: int | None, indent: str = "") -> list[str]:
    """Return one aligned line per field; lists of rows follow as tables, objects as indented fields. `fit`: the width
    to wrap at; None: do not wrap."""
    plain = {name: value for name, value in row.items() if not _is_nested(value)}
    room = max((len(title(name)) for name in plain), default=0)
    lines = []
    for name, value in plain.items():
        text, head = cell(value), f"{indent}{title(name):<{room}}{GAP}"
        code = COLOUR.get(text, "") if name in STATES and has_colour() else ""
        if fit is not None and len(head) + NARROWEST > fit:  # the value gets lines of its own
            lines += [*wrapped(head.strip(), fit), *wrapped(text, fit)]
            continue
        parts = [text] if fit is None else wrapped(text, fit - len(head))
        coloured = [f"\x1b[{code}m{one}\x1b[0m" if code else one for one in parts]
        lines += [f"{head}{coloured[0]}", *(" " * len(head) + one for one in coloured[1:])]
    for name, value in row.items():
        if _is_nested(value):
            lines += ["", f"{indent}{title(name)}:"]
            lines += _nested(value, fit, indent + GAP)
    return lines


def _is_nested(value: Any) -> bool:
    return (isinstance(value, dict) and bool(value)) or (
        isinstance(value, list) and any(isinstance(one, dict) for one in value)
    )


def _nested(value: Any, fit: int | None, indent: str) -> list[str]:
    if isinstance(value, dict):
        return _records(value, fit, indent) if _are_alike(list(value.values())) else fields(value, fit, indent)
    rows = [one if isinstance(one, dict) else {"value": one} for one in value]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    columns = [name for name in columns if any(row.get(name) not in (None, "", [], {}) for row in rows)] or columns[:1]
    return table(rows, columns, fit, indent)


def _are_alike(values: Sequence[Any]) -> bool:
    """Return whether these are objects of one shape, which make a table."""
    return len(values) > 1 and all(isinstance(one, dict) and one and one.keys() == values[0].keys() for one in values)


def _records(value: Mapping[str, Mapping[str, Any]], fit: int | None, indent: str) -> list[str]:
    """Return objects of the same shape as the lines of one table, one row per object. Objects that contain rows or
    objects follow the table, each under its own heading."""
    nested = [name for name, one in value.items() if any(_is_nested(part) for part in one.values())]
    rows = [{"field": title(name), **one} for name, one in value.items() if name not in nested]
    lines = table(rows, list(rows[0]), fit, indent) if rows else []
    for name in nested:
        plain = ", ".join(cell(part) for part in value[name].values() if not _is_nested(part))
        lines += ["", f"{indent}{title(name)}{f' ({plain})' if plain else ''}:"]
        for part in value[name].values():
            lines += _nested(part, fit, indent + GAP) if _is_nested(part) else []
    return lines
