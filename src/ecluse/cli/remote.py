"""Run a command of a server: parse its arguments, send the request, and show the answer."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from ecluse.cli import show
from ecluse.cli.arguments import Parser, as_typed, parser_for, request_of
from ecluse.cli.catalogue import ASKS, ASKS_NOT, add_connection, merged
from ecluse.cli.client import Client, Refused
from ecluse.cli.failure import BAD, OK, STILL_OPEN, misused
from ecluse.cli.follow import watch
from ecluse.cli.target import Given, client_for

Json = dict[str, Any]
PAGE = 200  # rows per request of --all
PAGING = {"limit", "offset", "cursor"}  # parameters of a list that do not filter it


def parser_of(command: Json) -> Parser:
    parser = parser_for(command)
    known = parser.options()
    if _has_cursor(command):
        parser.add_argument("--all", dest="given_all", action="store_true", help="all rows, over all pages")
    if "follows" in command:
        if "--wait" not in known:
            parser.add_argument("--wait", dest="given_wait", action="store_true", help="follow the run until it ends")
        if "--timeout" not in known:
            text = "stop following the run after this time"
            parser.add_argument("--timeout", dest="given_timeout", type=float, metavar="SECONDS", help=text)
    confirms = "preview" in command
    add_connection(parser, yes=ASKS if confirms else ASKS_NOT if command["method"] != "GET" else None)
    return parser


def execute(command: Json, words: Sequence[str], before: Given) -> int:
    parsed = parser_of(command).parse(words)
    given = merged(before, parsed)
    path, query, body = request_of(command, parsed)
    client = client_for(given)
    try:
        return _done(client, command, parsed, given, path, query, body)
    except Refused as error:
        error.message = as_typed(command, error.message)
        raise


def _done(
    client: Client, command: Json, parsed: Namespace, given: Given, path: str, query: Json, body: Json | None
) -> int:
    """Send the request, after a confirmation where one is needed, and show the answer; return the exit code."""
    if "preview" in command and not parsed.given_yes and not _confirmed(client, command, path, query, body):
        return BAD
    if getattr(parsed, "given_all", False):
        answer = _all_pages(client, command, path, query)
    else:
        answer = client.ask(command["method"], path, query, body)
    if getattr(parsed, "given_wait", False):
        followed = str(answer[command["follows"]])
        code = watch(client, followed, timeout=parsed.given_timeout, as_json=given.json)
        if "result" in command and not given.json and code != STILL_OPEN:
            show_result(client, command["result"], answer["id"])
        return code
    if given.json:
        show.write_json({"rows": _rows(answer)} if isinstance(answer, str) else answer)
    elif isinstance(answer, str):
        show.write_text(answer.rstrip("\r\n"))
    else:
        _show(command, answer, filtered=bool(query.keys() - PAGING))
    return OK


def show_result(client: Client, declared: Json, number: str) -> None:
    """Show the result of a run that has ended: the fields that the command declares, of the record with this id. If all
    of them have a value, name the next command, else the reason why there is none."""
    found = client.get(re.sub(r"{\w+}", number, declared["read"]))
    shown = {name: found[name] for name in declared["fields"]}
    for line in show.fields(shown, show.width()):
        show.write(line)
    if all(shown.values()):
        show.say(f"Next: {declared['next'].format_map(shown)}")
    elif reason := found[declared["otherwise"]]:
        show.say(f"{show.title(declared['otherwise'])}: {show.harmless(reason)}")


def _rows(text: str) -> list[Json]:
    """Return the rows of an exported file: CSV, or one JSON object per line."""
    if text.startswith("{"):
        return [json.loads(line) for line in text.split("\n") if line]
    return list(csv.DictReader(io.StringIO(text, newline="")))


def _has_cursor(command: Json) -> bool:
    return any(field["name"] == "cursor" for field in command["fields"])


def _confirmed(client: Client, command: Json, path: str, query: Json, body: Json | None) -> bool:
    """Show the preview of a command and ask the user to confirm it; return whether the user did. Raise Failure if stdin
    is no terminal."""
    declared = command["preview"]
    at = declared["path"]
    for given, wanted in zip(path.split("/"), command["path"].split("/"), strict=True):
        at = at.replace(wanted, given) if wanted.startswith("{") else at
    values = {**query, **(body or {})}
    preview = client.get(at, {name: values[name] for name in declared["query"] if name in values})
    for line in _lines(command, preview):
        show.say(line)
    if not sys.stdin.isatty():
        raise misused("Nothing was done: a confirmation is needed, and stdin is no terminal. Use --yes to confirm.")
    sys.stderr.write(f"{command['name']}: continue? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    show.say("Nothing was done.")
    return False


def _all_pages(client: Client, command: Json, path: str, query: Json) -> Any:
    answer = client.get(path, {"limit": PAGE, **query})
    rows = answer[command["list"]]
    while answer.get("next_cursor"):
        answer = client.get(path, {"limit": PAGE, **query, "offset": 0, "cursor": answer["next_cursor"]})
        rows += answer[command["list"]]
    return {**answer, command["list"]: rows, "limit": len(rows), "offset": query.get("offset", 0)}


def _write_text(rows: Sequence[Json], columns: Sequence[str], name: str) -> None:
    """Write the field `name` of the rows to stdout, one after another. The values of `columns` go to stderr, whenever
    they change, so that stdout has only the text."""
    for heads, parts in groupby(rows, lambda row: [f"{show.title(column)} {row[column]}" for column in columns]):
        show.say(", ".join(heads))
        lines = "".join(str(part[name]) for part in parts).splitlines()
        show.write("\n".join(show.harmless(line) for line in lines))


def _lines(command: Json, answer: Json) -> list[str]:
    shown = {name: value for name, value in answer.items() if name not in command.get("hides", ())}
    return show.fields(show.cancelled_apart(shown), show.width())


def _show(command: Json, answer: Any, *, filtered: bool) -> None:
    if "list" not in command:
        for line in _lines(command, answer):
            show.write(line)
        return
    rows = answer[command["list"]]
    beside = {
        name: value
        for name, value in answer.items()
        if name not in (command["list"], "limit", "offset", "next_cursor") and value is not None
    }
    for line in show.fields(beside, show.width()):
        show.write(line)
    if not rows:
        nothing = f"no {show.title(command['list'])}"
        show.say(f"{nothing} match the filters" if filtered else command.get("empty") or nothing)
        return
    if "text" in command:
        _write_text(rows, command["columns"], command["text"])
    else:
        for line in show.table([show.cancelled_apart(row) for row in rows], command["columns"], show.width()):
            show.write(line)
    if answer.get("next_cursor"):
        show.say(f"There are more rows: --all lists them, --cursor {answer['next_cursor']} the next {answer['limit']}.")
