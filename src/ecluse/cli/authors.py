"""Commands for authors of flows: `ecluse new` and `ecluse dev`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from ecluse.cli import show
from ecluse.cli.arguments import Parser
from ecluse.cli.catalogue import Local
from ecluse.cli.failure import OK
from ecluse.cli.target import Given


def _new_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", help="name of the flow and of its folder, such as price_sync")


def new(given: Given, parsed: Namespace) -> int:
    from ecluse.cli.new import create

    written = [str(path.relative_to(Path.cwd())) for path in create(parsed.name, Path.cwd())]
    if given.json:
        show.write_json({"written": written})
    else:
        show.write("\n".join([*written, f"Next: cd {parsed.name} && ecluse dev"]))
    return OK


def _dev_arguments(parser: Parser) -> None:
    parser.add_argument("--port", type=int, default=8080, help="port of the server; default 8080")
    parser.add_argument("--sandbox-port", type=int, default=8089, help="port of the sandbox; default 8089")
    load = "load this flow instead of those that are found, as package:NAME; repeatable"
    parser.add_argument("--flow", action="append", default=[], metavar="PACKAGE:NAME", help=load)


def dev(_: Given, parsed: Namespace) -> int:
    from ecluse.cli.dev import run

    return run(parsed.port, parsed.sandbox_port, parsed.flow)


COMMANDS = [
    Local(
        "new",
        "Write a folder with a flow that works, its test, and the entry point by which servers find it.",
        new,
        _new_arguments,
        example="new price_sync",
    ),
    Local(
        "dev",
        "Run the sandbox and a server with the flows below the current directory; a changed file starts the server "
        "again.",
        dev,
        _dev_arguments,
    ),
]
