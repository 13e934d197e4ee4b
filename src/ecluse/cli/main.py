"""Entry point of `ecluse`. Commands of a server are made from its OpenAPI document (commands.json); the others are in
local.py. Only the modules that a command needs are imported: `ecluse --help` must be quick."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from ecluse.cli import show
from ecluse.cli.arguments import Parser
from ecluse.cli.catalogue import CONNECTION, Found, Json, Local, add_connection, find, help_of_group, merged, name_of
from ecluse.cli.client import Client
from ecluse.cli.document import commands_of
from ecluse.cli.failure import INTERRUPTED, OK, REFUSED, Failure, meant, misused
from ecluse.cli.local import all_commands
from ecluse.cli.remote import execute
from ecluse.cli.target import Given, client_for

HELP = ("-h", "--help")


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(words: Sequence[str]) -> int:
    from ecluse.base.errors import EcluseError

    try:
        code = _dispatch(list(words))
        sys.stdout.flush()
    except Failure as failure:
        show.say(f"ecluse: {show.harmless(failure.message)}")
        return failure.code
    except EcluseError as error:
        show.say(f"ecluse: {show.harmless(error.message)}")
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    return code


def _dispatch(words: list[str]) -> int:
    given, words = _leading(words)
    if words[:1] == ["--version"]:
        from ecluse.base.version import version

        show.write(f"ecluse {version()}")
        return OK
    commands = all_commands()
    found = find(commands, words)
    if found.command is None and found.rest and not found.rest[0].startswith("-"):
        commands, found = _ask_server(commands, found, words, given)
    if found.command is None:
        return _group(commands, found)
    if isinstance(found.command, Local):
        return _local(found.command, found.rest, given)
    return execute(found.command, found.rest, given)


def _leading(words: list[str]) -> tuple[Given, list[str]]:
    """Split off the options before the command's name; return them and the remaining words. In that place they always
    mean connection and output, even if the command has a field of the same name. Raise Failure if one lacks its
    value."""
    names = {option.split()[0]: option.split()[0][2:].replace("-", "_") for option in CONNECTION}
    values: dict[str, str] = {}
    as_json = False
    while words and words[0].startswith("--"):
        name, equals, value = words[0].partition("=")
        if name == "--json":
            as_json, words = True, words[1:]
        elif name not in names:
            break
        elif equals:
            values[names[name]], words = value, words[1:]
        elif len(words) > 1:
            values[names[name]], words = words[1], words[2:]
        else:
            raise misused(f"{name} needs a value.")
    return Given(**values, json=as_json), words


def _group(commands: Sequence[Local | Json], found: Found) -> int:
    """Print the help of a group of commands; return OK if --help was given, REFUSED if the command is missing. Raise
    Failure for an unknown word, with the most similar name."""
    name = " ".join(("ecluse", *found.words))
    if found.rest and found.rest[0] not in HELP:
        word = found.rest[0]
        names = {
            one.split()[len(found.words)]
            for one in map(name_of, commands)
            if one.split()[: len(found.words)] == [*found.words]
        }
        what = "option" if word.startswith("-") else "command"
        raise misused(f"there is no {what} {show.harmless(word)!r}.{meant(word, names)} See `{name} --help`.")
    show.write(help_of_group(commands, found.words, shutil.get_terminal_size().columns))
    return OK if found.rest else REFUSED


def _ask_server(
    commands: list[Local | Json], found: Found, words: Sequence[str], given: Given
) -> tuple[list[Local | Json], Found]:
    """Look the command up in the OpenAPI document of the server, which may have flows or commands that this program
    does not know. Return all commands, those of the server included, and what was found among them; both unchanged if
    no server answers."""
    try:
        client = client_for(given, appear_seconds=0)
        document = Client(client.url, None).get("/openapi.json")
    except Failure:  # there is no server to ask
        return commands, found
    more = {one["name"]: one for one in commands_of(document)}
    here = set(map(name_of, commands))
    commands = [*commands, *(one for name, one in more.items() if name not in here)]
    return commands, find(commands, words)


def _local(command: Local, words: Sequence[str], given: Given) -> int:
    if command.own_help or (command.takes_rest and not (words and words[0] in HELP)):
        return command.run(list(words))
    example = f"example:\n  ecluse {command.example}" if command.example else ""
    parser = Parser(f"ecluse {command.name}", command.help, example)
    command.add(parser)
    if command.connects:
        add_connection(parser)
    parsed = parser.parse(words)
    return command.run(merged(given, parsed), parsed)
