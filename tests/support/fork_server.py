"""Real processes that start in milliseconds: a fork server (`fork_server_main`) and a handle on each child."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ecluse.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
PYTHONPATH = os.pathsep.join(str(ROOT / folder) for folder in ("src", "examples", "."))


CLIENT = {"ECLUSE_URL", "ECLUSE_KEY", "XDG_CONFIG_HOME"}


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without the program's own knobs and profiles, plus these."""
    ignored = CLIENT | Settings.model_fields.keys()
    inherited = {name: value for name, value in os.environ.items() if name not in ignored}
    ours = {"PYTHONPATH": PYTHONPATH, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    ours |= {"XDG_CONFIG_HOME": os.devnull, "ECLUSE_DATA_DIR": os.devnull}
    return inherited | ours | variables


class Child:
    """One process: `ecluse serve`, a command, an auditor, a sandbox."""

    def __init__(self, stdout: Path, stderr: Path) -> None:
        self.stdout = stdout
        self.stderr = stderr
        self.pid = 0
        self.code: int | None = None  # as subprocess has it: -9 for SIGKILL
        self._started = threading.Event()
        self._ended = threading.Event()

    def wait(self, seconds: float) -> int:
        if not self._ended.wait(seconds) or self.code is None:
            raise TimeoutError(f"process {self.pid} is still there after {seconds:g} s: {self.tail()}")
        return self.code

    def poll(self) -> int | None:
        return self.code

    @property
    def lives(self) -> bool:
        return self.code is None

    def signal(self, number: signal.Signals) -> None:
        if self.lives:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def said(self) -> str:
        return self.stderr.read_text(errors="replace") if self.stderr.exists() else ""

    def tail(self, lines: int = 15) -> str:
        return "\n".join(self.said().splitlines()[-lines:])


class ForkServer:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count(1)
        self._children: dict[int, Child] = {}
        self._asking = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server_main"],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._listener = threading.Thread(target=self._listen, name="fork server", daemon=True)
        self._listener.start()

    def start(self, module: str, arguments: Sequence[str] = (), variables: Mapping[str, str] | None = None) -> Child:
        assert self._process.stdin is not None
        with self._asking:
            number = next(self._numbers)
            child = Child(self._folder / f"{number}.out", self._folder / f"{number}.err")
            self._children[number] = child
            own = {"ECLUSE_DATA_DIR": str(self._folder / f"{number}.data")}  # not that of the machine
            request = {
                "id": number,
                "module": module,
                "arguments": list(arguments),
                "environment": environment(**(own | dict(variables or {}))),
                "stdout": str(child.stdout),
                "stderr": str(child.stderr),
            }
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        if not child._started.wait(90):
            raise RuntimeError("the fork server does not answer")
        return child

    def new_folder(self) -> str:
        """A data directory that no other process uses."""
        return str(self._folder / f"{next(self._numbers)}.data")

    def run(
        self,
        module: str,
        arguments: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        seconds: float = 100,
    ) -> tuple[int, str, str]:
        """Exit code, what it printed, what it complained about."""
        child = self.start(module, arguments, variables)
        code = child.wait(seconds)
        return code, child.stdout.read_text(), child.said()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._listener.join(10)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            news = json.loads(line)
            child = self._children[news["id"]]
            if "pid" in news:
                child.pid = news["pid"]
                child._started.set()
            else:
                child.code = news["code"]
                child._ended.set()
        self._process.stdout.close()


@contextlib.contextmanager
def running_fork_server(folder: Path) -> Iterator[ForkServer]:
    one = ForkServer(folder)
    try:
        yield one
    finally:
        one.close()
