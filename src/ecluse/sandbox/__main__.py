"""``python -m ecluse.sandbox --port P --seed S [--faults FILE.json]``: a sandbox in a process of its own.

It prints one line when it listens and exits on SIGTERM or SIGINT, even with calls in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ecluse.sandbox.faults import RuleError
from ecluse.sandbox.server import serve

HOST = "127.0.0.1"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, serve until a signal to stop, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ecluse.sandbox", description="Vendors simulated on the wire.")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0, the default, takes any free one")
    parser.add_argument("--seed", type=int, default=1, help="seed of the catalogue and of the faults")
    parser.add_argument("--faults", type=Path, metavar="FILE.json", help="fault rules in force from the start")
    args = parser.parse_args(argv)
    try:
        faults = json.loads(args.faults.read_bytes()) if args.faults is not None else []
        rules = faults if isinstance(faults, list) else [faults]
    except (OSError, ValueError) as error:
        return refuse(f"cannot read the fault rules in {args.faults}: {error}")
    try:
        asyncio.run(run(args.port, args.seed, rules))
    except RuleError as error:
        return refuse(f"bad fault rule in {args.faults}: {error}")
    except OSError as error:
        return refuse(f"cannot listen on {HOST}:{args.port}: {error.strerror}")
    return 0


async def run(port: int, seed: int, faults: list[dict[str, object]]) -> None:
    """Serve on this port until SIGTERM or SIGINT, with these fault rules from the start."""
    serving = asyncio.create_task(serve(HOST, port, seed, faults, announce))
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving


def announce(port: int) -> None:
    print(f"sandbox ready on http://{HOST}:{port}", flush=True)


def refuse(message: str) -> int:
    """Print why the sandbox cannot start, and return the exit code for that."""
    print(f"sandbox: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
