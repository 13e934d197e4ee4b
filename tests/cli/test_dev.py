"""`ecluse dev`: sandbox and server in one command; a changed file starts the server again; one signal stops both."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ecluse.cli.new import create
from tests.support.command_line import environment, free_port


def wait_until(condition: Callable[[], bool], log: Path) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.05)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create("price_sync", tmp_path)
    return tmp_path / "price_sync"


@pytest.mark.long
@pytest.mark.timeout(150)
def test_one_command_serves_the_flow_again_after_each_change(folder: Path, dsn: str) -> None:
    port, vendors = free_port(), free_port()
    log = folder.parent / "dev.log"
    command = [sys.executable, "-m", "ecluse", "dev", "--port", str(port), "--sandbox-port", str(vendors)]
    variables = environment(DATABASE_URL=dsn, ECLUSE_DATA_DIR=str(folder.parent / "data"))
    with log.open("wb") as out, subprocess.Popen(command, cwd=folder, env=variables, stdout=out, stderr=out) as dev:
        try:
            wait_until(lambda: log.read_text().count("server: started") == 1, log)
            assert "ecluse dev: starting a server with price_sync.flow:FLOW" in log.read_text()
            assert answers(port)
            wait_until(lambda: answers(vendors), log)
            flow = folder / "price_sync/flow.py"
            flow.write_text(flow.read_text() + "\nraise ValueError('half a change')\n")
            wait_until(lambda: "half a change" in log.read_text(), log)
            assert dev.poll() is None  # a flow that cannot be imported waits for the next change
            flow.write_text(flow.read_text().replace("raise ValueError('half a change')\n", ""))
            wait_until(lambda: log.read_text().count("server: started") == 2, log)
            assert answers(port)
        finally:
            dev.send_signal(signal.SIGTERM)
    assert dev.returncode == 0, log.read_text()
    assert not answers(port)
    assert not answers(vendors)
