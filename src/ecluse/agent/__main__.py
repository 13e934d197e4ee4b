"""Command line of the agent: ``ecluse agent --server URL --token-file FILE``, or the zip file with the same options.
Exit code 0: stopped by a signal; 2: it cannot work, with the reason on stderr."""

import argparse
import hashlib
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from ecluse.agent import settings
from ecluse.agent.loop import Agent, say
from ecluse.agent.server import Away, Backoff, Refused, Server
from ecluse.agent.store import Store

VERSION = "1"  # of the agent, shown in lists; the protocol has no version of its own
FILE, STATE = Path("/etc/ecluse/agent.toml"), Path("/var/lib/ecluse-agent")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ecluse agent", description="Run the jobs of this host.")
    parser.add_argument("--server", required=True, metavar="URL", help="URL of the Ecluse server")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="file with the token to enrol with")
    parser.add_argument("--config", type=Path, default=FILE, metavar="FILE", help=f"what may run here; default {FILE}")
    parser.add_argument("--state", type=Path, default=STATE, metavar="DIR", help=f"the agent's state; default {STATE}")
    given = parser.parse_args(argv)
    try:
        allowed, server, store = settings.load(given.config), Server(given.server), Store(given.state)
        enrol(server, store, given.token_file)
    except (OSError, ValueError, Refused) as error:
        say(str(error))
        return 2
    threading.excepthook = _leave
    agent = Agent(server, store, allowed, VERSION)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.stopping.set())
    say(f"serving {', '.join(allowed.types)} for {server.url}")
    agent.run()
    if agent.locked_out:
        say(f"the server does not accept this agent any more: {agent.locked_out}")
    return 2 if agent.locked_out else 0


def enrol(server: Server, store: Store, token_file: Path | None) -> None:
    """Set the server's credential: the kept one, or one for a new token. Raise ValueError if there is neither."""
    kept, backoff = store.credential(), Backoff()
    token = token_file.read_text().strip() if token_file is not None else ""
    if kept is None and not token:
        raise ValueError("This agent is not enrolled: give --token-file, with a token of `ecluse jobs hosts token`.")
    mark = hashlib.sha256(token.encode()).hexdigest()
    about = {"hostname": platform.node(), "version": VERSION, "platform": platform.platform()}
    while kept is None or (token and kept["mark"] != mark):
        try:
            answer = server.call("/api/agent/enrol", {"token": token, **about})
            kept = {**answer, "server": server.url, "since": time.time(), "mark": mark}
            store.keep_credential(kept)
        except Away as error:
            say(f"enrolment: {error}; trying again")
            time.sleep(backoff.pause())
    if kept["server"] != server.url:
        raise ValueError(f"The state directory belongs to {kept['server']}. Give another --state for {server.url}.")
    server.credential = kept["credential"]


def _leave(failed: threading.ExceptHookArgs) -> None:
    """End the process with code 1 if a thread fails, such as on a full disk; a restart reports the kept results."""
    sys.__excepthook__(failed.exc_type, failed.exc_value or failed.exc_type(), failed.exc_traceback)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
