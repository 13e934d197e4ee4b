"""`ecluse dev`: run the sandbox and a server with the flows below the current directory, in one terminal. When a source
file below it changes, the server is started again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

LOOK_SECONDS = 0.5
STOP_SECONDS = 15
FLOW = re.compile(r"^(FLOW|PACKAGE)\b.*=", re.MULTILINE)
SKIPPED = {"tests", "node_modules", "build", "dist"}
VENDORS = {
    "CRM_BASE_URL": "/crm",
    "ELEVENLABS_BASE_URL": "/elevenlabs",
    "LLM_BASE_URL": "/llm/v1",
    "PRICE_LIST_URL": "/price-list",
}
KEYS = {"CRM_API_KEY": "dev", "ELEVENLABS_API_KEY": "dev", "LLM_API_KEY": "dev", "LLM_MODEL": "gpt-4.1"}


def sources(folder: Path) -> dict[Path, float]:
    """Return the Python files below the folder with their modification times, without hidden folders, virtual
    environments, tests and build results."""
    found: dict[Path, float] = {}
    for where, folders, names in os.walk(folder):
        folders[:] = [
            one
            for one in folders
            if one not in SKIPPED and not one.startswith((".", "__")) and not Path(where, one, "pyvenv.cfg").exists()
        ]
        for name in names:
            if name.endswith(".py"):
                path = Path(where, name)
                found[path] = path.stat().st_mtime
    return found


def flows(folder: Path) -> list[str]:
    """Return the flows and flow packages that the modules below the folder define, as `module:FLOW` or
    `module:PACKAGE`."""
    return [
        f"{'.'.join(path.relative_to(folder).with_suffix('').parts)}:{name}"
        for path in sorted(sources(folder))
        for name in dict.fromkeys(FLOW.findall(path.read_text(errors="replace")))
    ]


def run(port: int, sandbox_port: int, named: Sequence[str]) -> int:
    """Run the sandbox and the server until interrupted. `named`: the flows to load; by default those found below the
    current directory."""
    here = Path.cwd()
    vendors = {name: f"http://127.0.0.1:{sandbox_port}{path}" for name, path in VENDORS.items()}
    environment = {**vendors, **KEYS, **os.environ}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sandbox = subprocess.Popen([sys.executable, "-m", "ecluse", "sandbox", "--port", str(sandbox_port)])  # noqa: S603
    server: subprocess.Popen[bytes] | None = None
    try:
        while True:
            seen, loaded = sources(here), list(named) or flows(here)
            options = [word for one in loaded for word in ("--flow", one)]
            print(f"ecluse dev: starting a server with {', '.join(loaded) or 'the built-in flows'}", flush=True)
            command = [sys.executable, "-m", "ecluse", "serve", "--port", str(port), *options]
            server = subprocess.Popen(command, env=environment)  # noqa: S603 - our own program
            while sources(here) == seen:
                time.sleep(LOOK_SECONDS)
                if sandbox.poll() is not None:
                    return sandbox.returncode or 1
            print("ecluse dev: a file has changed, starting the server again", flush=True)
            _stop(server)
    except KeyboardInterrupt:
        return 0
    finally:
        for process in (server, sandbox):
            if process is not None:
                _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
