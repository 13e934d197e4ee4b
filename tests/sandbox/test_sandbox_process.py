"""The sandbox as a process, and as a coroutine of another program."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from aiohttp import ClientSession

from ecluse.sandbox.__main__ import main
from ecluse.sandbox.server import serve
from ecluse.testing.sandbox import running_sandbox

COMMAND = [sys.executable, "-m", "ecluse.sandbox"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_it_leaves_promptly_though_calls_hang(tmp_path: Path, signum: int) -> None:
    faults = tmp_path / "faults.json"
    faults.write_text('{"kind":"timeout","methods":["GET"]}')
    with subprocess.Popen([*COMMAND, "--seed", "3", "--faults", faults], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        port = int(line.rsplit(":", 1)[1])
        assert line == f"sandbox ready on http://127.0.0.1:{port}\n"
        with contextlib.ExitStack() as hanging:
            for path in ("/price-list/articles", "/price-list/articles/SKU-00001", "/"):
                client = hanging.enter_context(socket.create_connection(("127.0.0.1", port)))
                client.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            while len(json.load(urlopen(f"http://127.0.0.1:{port}/_sandbox/ledger"))["entries"]) < 3:
                time.sleep(0.01)
            os.kill(process.pid, signum)
            assert process.wait(5) == 0, "the calls hang for a minute"
        assert process.stdout.read() == ""


def test_a_busy_port_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        assert main(["--port", str(port)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"sandbox: cannot listen on 127.0.0.1:{port}: ")
    assert (said.err.count("\n"), said.out) == (1, "")


def test_a_bad_faults_file_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faults = tmp_path / "faults.json"
    assert main(["--faults", str(faults)]) == 2
    assert f"cannot read the fault rules in {faults}: " in capsys.readouterr().err
    faults.write_text("[{")
    assert main(["--faults", str(faults)]) == 2
    assert f"cannot read the fault rules in {faults}: " in capsys.readouterr().err
    faults.write_text(json.dumps([{"kind": "reset", "rate": 2}]))
    done = subprocess.run([*COMMAND, "--faults", faults], capture_output=True, text=True, timeout=10, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"sandbox: bad fault rule in {faults}: rate: a reset rule needs a number from 0 to 1\n"


def test_a_reset_brings_back_the_first_faults() -> None:
    with running_sandbox(faults=[{"kind": "server_error"}]) as sandbox:
        url = f"{sandbox.url}/price-list/articles"
        with pytest.raises(HTTPError, match="503") as caught:
            urlopen(url)  # noqa: S310
        caught.value.close()
        sandbox.set_faults([])
        assert urlopen(url).status == 200  # noqa: S310
        sandbox.reset()
        with pytest.raises(HTTPError, match="503") as caught:
            urlopen(url)  # noqa: S310
        caught.value.close()


async def test_serve_runs_inside_another_program_until_cancelled() -> None:
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve("127.0.0.1", 0, 5, [{"kind": "not_found", "times": 1}], port.set_result))
    async with ClientSession(f"http://127.0.0.1:{await port}/") as http:
        assert (await (await http.get("_sandbox/health")).json())["seed"] == 5
        assert [(await http.get("price-list/articles/SKU-00001")).status for _ in range(2)] == [404, 200]
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port.result())
