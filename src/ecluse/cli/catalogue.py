"""All commands by name: commands of this program (Local), and commands of servers from commands.json or from the
OpenAPI document of a server."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from ecluse.cli.arguments import Parser
from ecluse.cli.failure import EXIT_CODES
from ecluse.cli.target import Given

Json = dict[str, Any]
COLUMN = 18

CONNECTION = {
    "--url URL": "server to use",
    "--key-file FILE": "file with the API key; - reads it from stdin",
    "--profile NAME": "profile made by `ecluse login`",
    "--tenant NAME": "tenant to act for, with an admin key of the tenant default",
}
WHERE = (
    "A command talks to the server of --url (with --key-file), else of ECLUSE_URL (with ECLUSE_KEY), else of the "
    "profile that `ecluse login` made, else to the server that `ecluse serve` runs on this host."
)
ASKS, ASKS_NOT = "do not ask for confirmation", "no effect: this command asks for no confirmation"
ABOUT = "Periodic work over records held in other people's systems, with one truthful outcome per record."


@dataclass(frozen=True)
class Local:
    """A command of this program, as opposed to one that a server offers. `add` declares its arguments; `run` executes
    it and returns the exit code."""

    name: str
    help: str
    run: Callable[..., int]
    add: Callable[[Parser], None] = lambda parser: None  # noqa: ARG005 - none
    example: str = ""
    connects: bool = False  # talks to a server
    takes_rest: bool = False  # all further words are passed on unparsed
    own_help: bool = False  # --help is passed on, too

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(self.name.split())


class Found(NamedTuple):
    command: Local | Json | None
    words: tuple[str, ...]  # of the command or the group
    rest: list[str]


@cache
def packaged() -> list[Json]:
    found: list[Json] = json.loads((files("ecluse.cli") / "commands.json").read_text())
    return found


def name_of(command: Local | Json) -> str:
    return command.name if isinstance(command, Local) else str(command["name"])


def find(commands: Iterable[Local | Json], words: Sequence[str]) -> Found:
    """Find the command with the longest name that these words begin with. If there is none, `command` is None and
    `words` is the longest group of commands that they begin with, which may be empty."""
    by_words = {tuple(name_of(one).split()): one for one in commands}
    for count in range(len(words), 0, -1):
        if (start := tuple(words[:count])) in by_words:
            return Found(by_words[start], start, list(words[count:]))
    groups = {start[:n] for start in by_words for n in range(len(start))}
    count = max(n for n in range(len(words) + 1) if tuple(words[:n]) in groups)
    return Found(None, tuple(words[:count]), list(words[count:]))


def below(commands: Iterable[Local | Json], group: Sequence[str]) -> dict[str, str]:
    """Return the entries of a group by name, sorted: for a command the first sentence of its help, for a group the
    names of its commands. Commands without a help text are left out."""
    found: dict[str, list[str]] = {}
    summaries = {}
    for one in commands:
        words = name_of(one).split()
        if isinstance(one, Local) and not one.help:  # for shells
            continue
        if words[: len(group)] == list(group) and len(words) > len(group):
            name, inner = words[len(group)], words[len(group) + 1 :]
            if inner:
                found.setdefault(name, []).append(" ".join(inner))
            else:
                found.setdefault(name, [])
                summaries[name] = summary(one.help if isinstance(one, Local) else one["help"])
    return {name: summaries.get(name) or ", ".join(inner) for name, inner in sorted(found.items())}


def summary(text: str) -> str:
    """Return the first sentence of the text, without its full stop."""
    return " ".join(text.split()).partition(". ")[0].rstrip(".")


def help_of_group(commands: Sequence[Local | Json], group: Sequence[str], width: int) -> str:
    name = " ".join(("ecluse", *group))
    own = [one for one in commands if isinstance(one, Local)]
    lines = [f"Usage: {name} COMMAND …", ""]
    if group:
        lines += _listed(below(commands, group), width)
        lines += ["", *textwrap.wrap(f"`{name} COMMAND --help` explains a command.", width)]
        return "\n".join(lines)
    lines += [*textwrap.wrap(ABOUT, width), "", "commands of a server:"]
    remote = below([one for one in commands if not isinstance(one, Local)], ())
    local = {key: value for key, value in below(own, ()).items() if key not in remote}
    lines += [*_listed(remote, width), "", "commands of this host:", *_listed(local, width)]
    lines += ["", "options:", *_listed({"--version": "print the version", "--json": "print JSON", **CONNECTION}, width)]
    lines += ["", *textwrap.wrap(WHERE, width), "", "exit codes:"]
    lines += _listed({str(code): text for code, text in EXIT_CODES.items()}, width)
    lines += ["", *textwrap.wrap("`ecluse COMMAND --help` explains a command.", width)]
    return "\n".join(lines)


def _listed(rows: dict[str, str], width: int) -> list[str]:
    lines = []
    for name, text in rows.items():
        head = f"  {name:<{COLUMN - 2}}  "
        parts = textwrap.wrap(text, max(20, width - len(head))) or [""]
        lines += [head + parts[0], *(" " * len(head) + one for one in parts[1:])]
    return lines


def add_connection(parser: Parser, *, yes: str | None = None) -> None:
    """Add the options for connection and output, except those whose name the command already uses for a field.
    `yes`: the help of --yes; None for a command that changes nothing."""
    parts = parser.add_argument_group("connection and output")
    for option, text in CONNECTION.items():
        name, metavar = option.split()
        if name not in parser.options():
            dest = f"given_{name[2:].replace('-', '_')}"
            parts.add_argument(name, dest=dest, metavar=metavar, help=text)
    parts.add_argument("--json", dest="given_json", action="store_true", help="print one JSON document")
    if yes is not None and "--yes" not in parser.options():
        parts.add_argument("--yes", dest="given_yes", action="store_true", help=yes)


def merged(before: Given, parsed: Any) -> Given:
    """Merge the options given before the command's name with those after it; the latter win."""
    names = ("url", "key_file", "profile", "tenant")
    after = {name: getattr(parsed, f"given_{name}", None) for name in names}
    values = {name: after[name] or getattr(before, name) for name in names}
    return Given(**values, json=before.json or getattr(parsed, "given_json", False))
