"""Command line of the agent: ``ecluse agent --server URL --token-file FILE``, or the zip file with the same options.
Exit code 0: stopped by a signal; 2: it cannot work, with the reason on stderr."""

from __future__ import annotations

import argparse
import platform
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ecluse.agent import settings
from ecluse.agent.loop import Agent, say
from ecluse.agent.server import Away, Backoff, Refused, Server
from ecluse.agent.store import Store

VERSION = "1"  # of the agent, shown in lists; the protocol has no version of its own
FILE, STATE = Path("/etc/ecluse/agent.toml"), Path("/var/lib/ecluse-agent")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ecluse agent", description="Run the jobs of this host.")
    parser.add_argument("--server", required=True, metavar="URL", help="URL of the Ecluse server")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="file with the enrolment token; first start only"
    )
    parser.add_argument("--config", type=Path, default=FILE, metavar="FILE", help=f"what may run here; default {FILE}")
    parser.add_argument("--state", type=Path, default=STATE, metavar="DIR", help=f"directory to keep; default {STATE}")
    given = parser.parse_args(argv)
    try:
        allowed, server, store = settings.load(given.config), Server(given.server), Store(given.state)
        enrol(server, store, given.token_file)
    except (settings.BadFile, OSError, ValueError, Refused) as error:
        say(str(error))
        return 2
    agent = Agent(server, store, allowed, VERSION)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.stop())
    say(f"serving {', '.join(allowed.types)} for {server.url}")
    agent.run()
    if agent.locked_out:
        say(f"the server does not accept this agent any more: {agent.locked_out}. Enrol it again with a new token.")
        return 2
    return 0


def enrol(server: Server, store: Store, token_file: Path | None) -> None:
    """Set the credential of `server`: the kept one, or a new one for the token."""
    kept = store.credential()
    if kept is not None and kept["server"] != server.url:
        raise ValueError(f"The state directory belongs to {kept['server']}. Give another --state for {server.url}.")
    if kept is None:
        if token_file is None:
            raise ValueError("This agent is not enrolled: give --token-file with a token from `ecluse jobs tokens`.")
        kept = {"server": server.url, **_enrolled(server, token_file.read_text().strip()), "since": time.time()}
        store.keep_credential(kept)
    server.credential = kept["credential"]


def _enrolled(server: Server, token: str) -> dict[str, Any]:
    backoff = Backoff()
    about = {"hostname": platform.node(), "version": VERSION, "platform": platform.platform()}
    while True:
        try:
            return server.call("/api/agent/enrol", {"token": token, **about})
        except Away as error:
            say(f"enrolment: {error}; trying again")
            time.sleep(backoff.pause())


if __name__ == "__main__":
    sys.exit(main())
