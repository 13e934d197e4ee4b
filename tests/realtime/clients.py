"""Clients as the world has them: pusher-js in node, a stream read line by line, a bare WebSocket."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.support.api_server import Client
from tests.support.waits import PATIENCE, wait_for

SCRIPT = Path(__file__).parent / "pusher_clients.js"


class PusherJs:
    """One node process for as many clients as a test wants."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            ["node", str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )
        self.seen: list[dict[str, Any]] = []
        self._names = 0
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.seen.append(json.loads(line))

    def do(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def client(self, server: Client, key: str, bearer: str | None = None) -> JsClient:
        self._names += 1
        client = JsClient(self, f"client {self._names}")
        self.do(do="connect", client=client.name, key=key, port=server.port, bearer=bearer or server.key)
        return client

    def disconnect(self) -> None:
        """All of them."""
        self.do(do="disconnect")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(10) == 0
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


class JsClient:
    def __init__(self, node: PusherJs, name: str) -> None:
        self.node, self.name = node, name

    def saw(self, **wanted: Any) -> list[dict[str, Any]]:
        mine = [one for one in list(self.node.seen) if one["client"] == self.name]
        return [one for one in mine if all(one.get(name) == value for name, value in wanted.items())]

    def expect(self, count: int = 1, **wanted: Any) -> list[dict[str, Any]]:
        return list(wait_for(lambda: found if len(found := self.saw(**wanted)) >= count else None))

    def connected(self) -> JsClient:
        self.expect(what="state", state="connected")
        return self

    def subscribe(self, channel: str) -> None:
        self.node.do(do="subscribe", client=self.name, channel=channel)

    def joined(self, channel: str) -> JsClient:
        self.subscribe(channel)
        self.expect(what="event", channel=channel, event="pusher:subscription_succeeded")
        return self

    def trigger(self, channel: str, event: str, data: Any) -> None:
        self.node.do(do="trigger", client=self.name, channel=channel, event=event, data=data)

    def events(self, channel: str, event: str) -> list[Any]:
        """Return the data of the events of this name that the client got on the channel."""
        return [one["data"] for one in self.saw(what="event", channel=channel, event=event)]


class Stream:
    """An open `GET /api/events`."""

    def __init__(self, server: Client, *channels: str, last: str | None = None) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        headers = {"Authorization": f"Bearer {server.key}"} | ({"Last-Event-ID": last} if last else {})
        query = "&".join(f"channel={channel}" for channel in channels)
        self._connection.request("GET", f"/api/events?{query}", headers=headers)
        self._socket = self._connection.sock
        self._answer = self._connection.getresponse()
        self.status, self.headers = self._answer.status, self._answer.headers
        self.ended = False
        self.last_id: str | None = None
        self._received: queue.Queue[dict[str, Any]] = queue.Queue()
        if self.status == 200:
            self._reader = threading.Thread(target=self._read)
            self._reader.start()
        else:
            self.error = json.loads(self._answer.read())["error"]

    def _read(self) -> None:
        fields: dict[str, str] = {}
        try:
            for line in self._answer:
                name, _, value = line.decode().rstrip("\n").partition(": ")
                if name == "":
                    if "id" in fields:
                        self.last_id = fields["id"]
                    if "data" in fields:
                        self._received.put(
                            {"id": fields.get("id"), "name": fields["event"], **json.loads(fields["data"])}
                        )
                    fields = {}
                else:
                    fields[name] = value
        except (OSError, http.client.HTTPException, ValueError):
            pass  # hung up, by whomever
        self.ended = True

    def next(self) -> dict[str, Any]:
        return self._received.get(timeout=PATIENCE)

    def heard(self, count: int) -> list[dict[str, Any]]:
        return [self.next() for _ in range(count)]

    def close(self) -> None:
        if self.status == 200:
            with contextlib.suppress(OSError):  # gone already
                self._socket.shutdown(socket.SHUT_RDWR)
            self._reader.join(PATIENCE)
        self._answer.close()
        self._connection.close()


@contextmanager
def raw_socket(server: Client, key: str, protocol: str = "protocol=7") -> Iterator[ClientConnection]:
    with connect(f"ws://127.0.0.1:{server.port}/app/{key}?{protocol}", compression=None) as opened:
        yield opened


def say(to: ClientConnection, event: str, **more: Any) -> None:
    to.send(json.dumps({"event": event, **more}))


def hear(at: ClientConnection) -> dict[str, Any]:
    """The next frame; data that is text is JSON again."""
    frame: dict[str, Any] = json.loads(at.recv(timeout=PATIENCE))
    if isinstance(frame.get("data"), str):
        frame["data"] = json.loads(frame["data"])
    return frame


def closed(socket: ClientConnection) -> int | None:
    """The code it is closed with, after whatever else is said."""
    while True:
        try:
            socket.recv(timeout=30)
        except ConnectionClosed as ended:
            return ended.rcvd and ended.rcvd.code
