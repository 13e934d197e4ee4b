"""Servers and sandboxes as separate processes, and their CPU time and memory."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import aiohttp
import psycopg

from bench.harness import ROOT
from bench.reads import ready
from ecluse.access import keys

TICKS = os.sysconf("SC_CLK_TCK")


class Running(NamedTuple):
    url: str
    pid: int


class Served(NamedTuple):
    session: aiohttp.ClientSession  # connected to the first replica
    replicas: list[Running]


@contextlib.contextmanager
def sandbox() -> Iterator[Running]:
    command = [sys.executable, "-m", "ecluse.sandbox", "--port", "0", "--seed", "7"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield Running(process.stdout.readline().rsplit(" ", 1)[-1].strip(), process.pid)
    finally:
        process.terminate()
        process.wait(10)


@contextlib.contextmanager
def replica(dsn: str, vendors: str, knobs: dict[str, str], roles: Sequence[str] = ()) -> Iterator[Running]:
    """Run a server with these roles, or with all."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    environment = {**os.environ, "DATABASE_URL": dsn, "ECLUSE_LOG_LEVEL": "ERROR", "PYTHONPATH": str(ROOT), **knobs}
    environment["ECLUSE_DATA_DIR"] = os.devnull  # the machine's own keeps its operator's key
    environment |= {"CRM_BASE_URL": f"{vendors}/crm", "CRM_API_KEY": "bench"}
    environment |= {"ELEVENLABS_BASE_URL": f"{vendors}/elevenlabs", "ELEVENLABS_API_KEY": "bench"}
    environment |= {"LLM_BASE_URL": f"{vendors}/llm/v1", "LLM_API_KEY": "bench", "LLM_MODEL": "bench"}
    chosen = [word for role in roles for word in ("--role", role)]
    process = subprocess.Popen([sys.executable, "-m", "ecluse", "serve", "--port", str(port), *chosen], env=environment)
    try:
        yield Running(f"http://127.0.0.1:{port}", process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


@contextlib.asynccontextmanager
async def served(
    dsn: str, vendors: str, knobs: dict[str, str], replicas: int, role: str = "operator"
) -> AsyncIterator[Served]:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        _, key = await keys.create(connection, "default", role, "bench")
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(replica(dsn, vendors, knobs)) for _ in range(replicas)]
        headers = {"Authorization": f"Bearer {key}"}
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(running[0].url, headers=headers, timeout=timeout) as session:
            for one in running:
                await ready(session, one.url)
            yield Served(session, running)


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: state, parent, …"""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a running process, without its children."""
    user, system = _stat(pid)[11:13]
    return (int(user) + int(system)) / TICKS


def postmaster(dsn: str) -> int:
    """Return the PID of the postmaster of a PostgreSQL on this machine."""
    with psycopg.connect(dsn) as connection:
        return int(_stat(connection.info.backend_pid)[1])


def cpu_of_server(pid: int) -> float:
    """Return the CPU time of a postmaster and all processes it has started."""
    seconds = 0.0
    for child in [child for task in Path(f"/proc/{pid}/task").iterdir() for child in _words(task / "children")]:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended: counted in its parent's time
            seconds += cpu_seconds(int(child))
    return seconds + sum(map(int, _stat(pid)[11:15])) / TICKS


def cpu_of_machine() -> float:
    """Return the CPU time used by all processes of the machine."""
    user, nice, system, _, _, *interrupts = map(int, _words(Path("/proc/stat"))[1:8])
    return (user + nice + system + sum(interrupts)) / TICKS


def _words(file: Path) -> list[str]:
    return file.read_text().split()


def peak_rss_mb(pid: int) -> float:
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024
