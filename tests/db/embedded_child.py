"""A process that uses the embedded server: says what it got, then obeys one command per line until its input ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psycopg  # noqa: F401  another user may not be able to load it later

from ecluse.base.errors import SetUpError
from ecluse.db import embedded


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)).replace("\n", " ") + "\n")
    sys.stdout.flush()


def main(data_dir: Path, uid: int) -> None:
    if uid != os.geteuid():
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    say("up")
    sys.stdin.readline()
    try:
        server = embedded.start(data_dir)
    except SetUpError as error:
        say("error", error.message)
        return
    say((server.pgdata / "postmaster.pid").read_text().split()[0])
    for line in sys.stdin:
        if line == "ensure\n":
            say(server.ensure_running())
        elif line == "fork\n":
            if (child := os.fork()) == 0:
                server.release()
                os._exit(0)
            os.waitpid(child, 0)
            say(server.is_running())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
