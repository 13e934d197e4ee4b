"""Programs of jobs: each in a session and process group of its own, with its output read as it comes. The group is
killed when the job must stop, and also when its first process has ended: a job leaves nothing running."""

import codecs
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ecluse.agent.job_types import Program

LOOK_SECONDS = 0.05
OWNER = "ECLUSE_JOB_RUN_ID"  # variable that every process of an attempt inherits


class Running:
    """Starts a program for the attempt `run_id`, and raises OSError if that fails. `write` gets its output."""

    def __init__(self, program: Program, run_id: str, write: Callable[[str], None]) -> None:
        with tempfile.TemporaryFile() as given:  # no pipe: a program that does not read it blocks nothing
            given.write(program.given.encode())
            given.seek(0)
            self._process = subprocess.Popen(  # noqa: S603 - what the agent's file allows
                program.arguments,
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**program.environment, OWNER: run_id},
                cwd="/",
                start_new_session=True,
            )
        self._write, self._decode = write, codecs.getincrementaldecoder("utf-8")("replace").decode

    def follow(self, must_stop: Callable[[], str | None], grace: float) -> tuple[int, str | None]:
        """Read the output until the program ends, or until `must_stop` returns a reason: then its group gets SIGTERM,
        and SIGKILL after `grace` seconds. Return the exit code, negative for a signal, and the reason."""
        stopped, kill_at = None, 0.0
        with self._process, selectors.DefaultSelector() as ready:
            assert self._process.stdout is not None  # noqa: S101 - a pipe
            ready.register(self._process.stdout, selectors.EVENT_READ)
            while not self._has_ended():
                self._read(ready)
                if stopped is None and (stopped := must_stop()) is not None:
                    kill_at = time.monotonic() + grace
                    self._signal(signal.SIGTERM)
                elif stopped is not None and time.monotonic() >= kill_at:
                    self._signal(signal.SIGKILL)
            # Before the process is reaped: until then its number, which is that of the group, is not given to another.
            self._signal(signal.SIGKILL)
            while self._read(ready):
                continue
        self._write(self._decode(b"", True))
        return self._process.returncode, stopped

    def _has_ended(self) -> bool:
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _read(self, ready: selectors.BaseSelector) -> bool:
        """Wait up to LOOK_SECONDS for output and pass it on; return False if none came."""
        if not (found := ready.select(LOOK_SECONDS)):  # with nothing registered it sleeps as long
            return False
        if piece := os.read(found[0][0].fd, 65_536):
            self._write(self._decode(piece))
        else:  # it has closed its output, and may go on
            ready.unregister(found[0][0].fd)
        return bool(piece)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):  # the latter: only a zombie is left of it
            os.killpg(self._process.pid, number)


def kill_leftovers(run_id: str) -> int:
    """Kill the processes of this attempt (by OWNER) that an agent left running when it died; return their number."""
    mark, killed = f"{OWNER}={run_id}".encode(), 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile, or is another user's
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
                killed += 1
    return killed
