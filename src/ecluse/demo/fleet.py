"""Agents for demonstrations and tests: real processes, and a proxy that can cut their connection to the server."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

HERE = "127.0.0.1"


@dataclass
class Agent:
    """An agent in a process of its own; its token, configuration, state and log are in `folder`."""

    server: str
    folder: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        files = {"--token-file": "token", "--config": "agent.toml", "--state": "state"}
        options = [word for name, file in files.items() for word in (name, str(self.folder / file))]
        command = [sys.executable, "-m", "ecluse.agent", "--server", self.server, *options]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(  # noqa: S603 - our own program
                command, stderr=log, env={"PATH": os.environ["PATH"]}, start_new_session=True
            )

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


@contextmanager
def fleet(agents: list[Agent]) -> Iterator[None]:
    """Start the agents for the duration of the context, then stop them and wait for their end."""
    try:
        for one in agents:
            one.start()
        yield
    finally:
        for one in agents:
            if one.process is not None:
                one.process.terminate()
        for one in agents:
            if one.process is not None:
                one.process.wait()


class Proxy:
    """TCP proxy that forwards each connection to one of `ports` that accepts it, chosen at random. `cut` closes all
    connections and refuses new ones until `mend`."""

    def __init__(self, *ports: int) -> None:
        self.ports, self._open = list(ports), True
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._listener = socket.create_server((HERE, 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._open = False
        for pair in self._pairs:
            for one in pair:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self._open = True

    def close(self) -> None:
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                try:
                    if not self._open:
                        raise ConnectionRefusedError
                    far = self._connected()
                except OSError:
                    near.close()
                    continue
                self._pairs.append((near, far))
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=_forward, args=(source, target), daemon=True).start()

    def _connected(self) -> socket.socket:
        for port in random.sample(self.ports, len(self.ports)):
            with suppress(OSError):
                return socket.create_connection((HERE, port))
        raise ConnectionRefusedError


def _forward(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65_536):
            target.sendall(data)
    for one in (source, target):
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
