"""A sandbox in a process of its own, for tests that call simulated vendors over HTTP."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import Request, urlopen

PAGE = 10_000


@dataclass(frozen=True)
class SandboxProcess:
    """A running sandbox: its faults and caps can be set, and its ledger lists every call that it received."""

    url: str
    pid: int

    def ledger(self, vendor: str = "", kind: str = "", after: int = 0) -> list[dict[str, Any]]:
        """Return the entries of the ledger with this vendor and kind, if given, and a number (`seq`) above `after`."""
        entries: list[dict[str, Any]] = []
        while True:
            query = urlencode({"vendor": vendor, "kind": kind, "after": after, "limit": PAGE})
            page = self._ask("GET", f"ledger?{query}")["entries"]
            entries += page
            if len(page) < PAGE:
                return entries
            after = page[-1]["seq"]

    def set_faults(self, rules: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Replace the fault rules in force by these; return them with their ids."""
        self._ask("DELETE", "faults")
        rules_with_ids: list[dict[str, Any]] = self._ask("POST", "faults", rules)["faults"]
        return rules_with_ids

    def set_limits(self, limit: dict[str, Any]) -> None:
        """Replace the limits in force by this one."""
        self._ask("DELETE", "limits")
        self._ask("POST", "limits", limit)

    def stats(self) -> dict[str, Any]:
        return self._ask("GET", "stats")

    def reset(self) -> None:
        self._ask("POST", "reset")

    def _ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        with urlopen(Request(f"{self.url}/_sandbox/{path}", data=data, method=method), timeout=30) as answer:  # noqa: S310
            value: dict[str, Any] = json.load(answer)
        return value


@contextlib.contextmanager
def running_sandbox(seed: int = 1, faults: list[dict[str, Any]] | None = None) -> Iterator[SandboxProcess]:
    """Start a sandbox on a free port, with this seed and these fault rules, and stop it at the end of the body. Raise
    RuntimeError if it does not start."""
    with tempfile.TemporaryDirectory() as folder:
        faults_file = Path(folder, "faults.json")
        faults_file.write_text(json.dumps(faults or []))
        command = [
            sys.executable,
            "-m",
            "ecluse.sandbox",
            "--port",
            "0",
            "--seed",
            str(seed),
            "--faults",
            str(faults_file),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - our own program
            try:
                line = process.stdout.readline() if process.stdout is not None else ""
                if not line.startswith("sandbox ready on "):
                    raise RuntimeError(f"the sandbox did not start (exit code {process.wait(5)})")
                yield SandboxProcess(line.removeprefix("sandbox ready on ").strip(), process.pid)
            finally:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                process.kill()
