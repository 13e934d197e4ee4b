"""Calls to the server, as docs/agent-protocol.md describes them. An error is one of two: the server is away, and the
call may be repeated, or it has refused, and repeating does not help."""

import http.client
import json
import random
import socket
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

CALL_SECONDS = 10.0
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0
LATER = (408, 425, 429)  # statuses below 500 that say: repeat it later

Json = dict[str, Any]


class Away(Exception):
    """The server cannot be reached, or cannot answer now."""


class Refused(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.locks_out = status in (401, 403)  # the credential is not valid: every call will be refused


class Server:
    """The server at one URL. A call opens a connection of its own: a kept one may have been closed by a proxy."""

    def __init__(self, url: str, credential: str | None = None) -> None:
        self.url, self.credential, self._parts = url.rstrip("/"), credential, urlsplit(url.rstrip("/"))
        if self._parts.scheme not in ("http", "https") or not self._parts.hostname:
            raise ValueError(f"{url!r} is not the URL of a server: http:// or https://, and a host")
        self._polling: http.client.HTTPConnection | None = None

    def call(self, path: str, body: Json, seconds: float = CALL_SECONDS, *, polls: bool = False) -> Json:
        """Send a request and return the answer. Raise Away if none comes in `seconds`, or if the server asks to repeat
        it later; Refused if it refuses. `polls`: `interrupt`, from another thread, ends the call at once."""
        host, port = str(self._parts.hostname), self._parts.port
        secure = self._parts.scheme == "https"
        connection = (http.client.HTTPSConnection if secure else http.client.HTTPConnection)(
            host, port, timeout=seconds
        )
        self._polling = connection if polls else self._polling
        headers = {"Content-Type": "application/json"}
        if self.credential is not None:
            headers["Authorization"] = f"Bearer {self.credential}"
        try:
            connection.request("POST", self._parts.path + path, json.dumps(body).encode(), headers)
            answer = connection.getresponse()
            return _parsed(answer.status, answer.read())
        except (OSError, http.client.HTTPException) as error:
            raise Away(f"{self.url}: {error or type(error).__name__}") from error
        finally:
            connection.close()

    def about(self, run_id: str, what: str, fence: int, body: Json, seconds: float = CALL_SECONDS) -> Json:
        return self.call(f"/api/agent/job-runs/{run_id}/{what}", {"fence": fence, **body}, seconds)

    def interrupt(self) -> None:
        if (connection := self._polling) is not None and connection.sock is not None:
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)


def _parsed(status: int, body: bytes) -> Json:
    try:
        value = json.loads(body)
    except ValueError:
        value = None
    value = value if isinstance(value, dict) else {}
    if status < 300 and value:
        return value
    error = value.get("error")
    if status >= 500 or status in LATER or not isinstance(error, dict):  # the last: not our server, but a proxy
        raise Away(f"the server answered {status}")
    raise Refused(status, str(error.get("code")), str(error.get("message")))


class Backoff:
    """Pauses between calls to a server that is away: they double, each with a random part, so that the agents of a
    restarted server do not return all at once."""

    def __init__(self, longest: float = LONGEST_PAUSE) -> None:
        self._longest, self._next = longest, FIRST_PAUSE

    def pause(self) -> float:
        pause, self._next = self._next, min(self._longest, self._next * 2)
        return pause * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
