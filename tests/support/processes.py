"""Which servers of PostgreSQL run in a directory."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path


def assert_nothing_runs(path: Path) -> None:
    deadline = time.monotonic() + 5
    while (left := processes_of(path)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def processes_of(path: Path, besides: str = "embedded_child.py") -> list[int]:
    """The servers and initdbs that work below `path`, without the processes of the tests that use them."""
    listed = subprocess.run(["ps", "-Aww", "-o", "pid=,args="], check=True, capture_output=True, text=True).stdout
    lines = [line.split(None, 1) for line in listed.splitlines() if str(path) in line and "-D" in line]
    return [int(pid) for pid, arguments in lines if besides not in arguments]
