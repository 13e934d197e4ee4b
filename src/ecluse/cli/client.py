"""HTTP client of the command line. A request that changes something carries an Idempotency-Key, so that it is safe to
send it again when the connection was lost."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

from ecluse.cli.failure import REFUSED, UNREACHABLE, Failure, misused

TIMEOUT_SECONDS = 60.0
NO_ROUTE = "There is no route "  # beginning of a server's message about an unknown path
LOST = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)  # the request may have been executed


class Unreachable(Failure):
    """The server could not be reached, lost the connection twice, or did not answer as a server of Ecluse."""

    def __init__(self, message: str) -> None:
        super().__init__(UNREACHABLE, message)


class Refused(Failure):
    """The server answered with an error."""

    def __init__(self, exit_code: int, message: str, status: int, code: str) -> None:
        super().__init__(exit_code, message)
        self.status, self.error_code = status, code


@dataclass(frozen=True)
class Client:
    url: str
    key: str | None
    tenant: str | None = None

    def get(self, path: str, query: Mapping[str, Any] | None = None) -> Any:
        return self.ask("GET", path, query)

    def ask(self, method: str, path: str, query: Mapping[str, Any] | None = None, body: Any = None) -> Any:
        """Send a request, and once more if the connection is lost; return the answer: parsed JSON, or the text of a CSV
        or NDJSON file. Raise Refused if the server answers with an error, Unreachable if it cannot be reached, loses
        the connection twice, or is no server of Ecluse."""
        parts = urlsplit(self.url)
        target = parts.path.rstrip("/") + path + _query(query)
        headers = {"User-Agent": "ecluse"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        if self.tenant is not None:
            headers["Ecluse-Tenant"] = self.tenant
        if method != "GET":
            headers["Idempotency-Key"] = os.urandom(16).hex()
        if body is not None:
            headers["Content-Type"] = "application/json"
        sent = None if body is None else json.dumps(body).encode()
        try:
            answer = self._send(method, target, sent, headers)
        except LOST:
            answer = self._again(method, target, sent, headers)
        return self._read(*answer)

    def _again(self, method: str, target: str, sent: bytes | None, headers: dict[str, str]) -> tuple[int, str, bytes]:
        try:
            return self._send(method, target, sent, headers)
        except LOST as error:
            raise Unreachable(f"The connection to {self.url} was lost twice: {error}.") from error

    def _send(self, method: str, target: str, sent: bytes | None, headers: dict[str, str]) -> tuple[int, str, bytes]:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        try:
            connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT_SECONDS)
        except (ValueError, http.client.InvalidURL) as error:
            raise misused(f"{self.url} is not a URL: {error}.") from error
        try:
            connection.request(method, target, sent, headers)
            answer = connection.getresponse()
            return answer.status, answer.headers.get_content_type(), answer.read()
        except LOST:
            raise
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            do = "Check the URL, and that the server runs."
            raise Unreachable(f"The server at {self.url} cannot be reached: {why}. {do}") from error
        finally:
            connection.close()

    def _read(self, status: int, kind: str, text: bytes) -> Any:
        if status == 200 and kind in ("text/csv", "application/x-ndjson"):
            return text.decode()
        try:
            found = json.loads(text) if text else None
        except ValueError:
            found = None
        if 200 <= status < 300 and found is not None:
            return found
        error = found.get("error") if isinstance(found, dict) else None
        if not isinstance(error, dict) or not isinstance(error.get("request_id"), str):
            raise Unreachable(
                f"{self.url} answered with status {status}, but not as a server of Ecluse: check the URL."
            )
        raise self._refused(status, error)

    def _refused(self, status: int, error: Mapping[str, Any]) -> Refused:
        code, message = str(error.get("code")), str(error.get("message", "")).rstrip()
        message = message[:1].upper() + message[1:]
        message = message if message.endswith((".", "?", "!")) else f"{message}."
        if status == 401:
            message += " Give a valid key with --key-file or ECLUSE_KEY, or log in with it: `ecluse login`."
        if message.startswith(NO_ROUTE):
            message += f" Check the URL {self.url}, and that the server has the version of this program."
        message += f" ({code}, request {error.get('request_id')})"
        return Refused(UNREACHABLE if status >= 500 else REFUSED, message, status, code)


def _query(query: Mapping[str, Any] | None) -> str:
    given = {name: _text(value) for name, value in (query or {}).items()}
    return f"?{urlencode(given, doseq=True)}" if given else ""


def _text(value: Any) -> Any:
    return ("true" if value else "false") if isinstance(value, bool) else value
