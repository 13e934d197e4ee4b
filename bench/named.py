"""Command line of a benchmark with named measurements: runs all of them, or those named, each on a database of its
own."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import uvloop

from bench.harness import fresh_database
from bench.server import server
from ecluse.db.connect import normalise
from ecluse.migrations.runner import upgrade

Measured = Callable[[str, str], Coroutine[Any, Any, dict[str, Any]]]


def main(of: str, description: str | None, names: Iterable[str], measured: Measured) -> None:
    """Print the figures of the measurements that the command names; `measured(dsn, name)` returns those of one."""
    parser = argparse.ArgumentParser(
        prog=f"bench.{of}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with server(None, None) as (dsn, _):
        for name in options.names or names:
            with fresh_database(dsn) as own:
                upgrade(normalise(own), [])
                found = uvloop.run(measured(normalise(own), name))
            line = "  ".join(f"{what} {value}" for what, value in found.items())
            print(json.dumps({name: found}) if options.json else f"{name:<8} {line}", flush=True)
