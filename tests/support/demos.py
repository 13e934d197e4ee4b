"""A demonstration as people run it, with everything that it makes below a folder of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import environment

PATIENCE = 240.0


class Demo:
    """`ecluse demo …`."""

    def __init__(self, folder: Path, *arguments: str, **variables: str) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "ecluse", "demo", *arguments]
        self.process = subprocess.Popen(
            command,
            env=environment(TMPDIR=str(folder), **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.out: list[str] = []
        self.err: list[str] = []
        pipes = ((self.process.stdout, self.out), (self.process.stderr, self.err))
        self._readers = [threading.Thread(target=lines.extend, args=(pipe,)) for pipe, lines in pipes]
        for reader in self._readers:
            reader.start()

    def wait_for(self, condition: Callable[[], Any]) -> Any:
        until = time.monotonic() + PATIENCE
        while not (value := condition()):
            assert self.process.poll() is None, self.said
            assert time.monotonic() < until, self.said
            time.sleep(0.05)
        return value

    @property
    def said(self) -> str:
        return "".join(self.err)

    def interrupt(self) -> int:
        """As Ctrl-C does: everybody in the foreground hears it, and impatient people press it twice."""
        for _ in range(2):
            os.killpg(self.process.pid, signal.SIGINT)
        return self.end()

    def end(self) -> int:
        code = self.process.wait(PATIENCE)
        for reader in self._readers:
            reader.join()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return code

    def left(self) -> list[str]:
        """Files, and processes: whatever it starts inherits where temporary files go, or works there."""
        mark = os.fsencode(self.folder)
        found = [path.name for path in self.folder.iterdir()]
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                command = (process / "cmdline").read_bytes()
                if mark in command + (process / "environ").read_bytes():
                    found.append(f"{process.name}: {command!r}")
        return found


@pytest.fixture
def demo() -> Iterator[Callable[..., Demo]]:
    folder = Path(tempfile.mkdtemp(prefix="ecl-")).resolve()
    folder.chmod(0o711)  # the account that runs PostgreSQL must get through
    started: list[Demo] = []

    def start(*arguments: str, **variables: str) -> Demo:
        started.append(Demo(folder, *arguments, **variables))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.terminate()  # it tidies up
            one.end()
    shutil.rmtree(folder, ignore_errors=True)
