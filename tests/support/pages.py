"""Pages asked for as a browser does, and streams of pages."""

from __future__ import annotations

import html
import http.client
import re
from dataclasses import dataclass

from fastapi import FastAPI
from fastapi.routing import iter_route_contexts

from ecluse.web.authentication import COOKIE, Page
from tests.support.api_server import Answer, Client
from tests.support.waits import PATIENCE

# Forms need the permission of their operation, which `test_forms.py` looks at.
FORMS = "/ui/do/"


def text(answer: Answer) -> str:
    """What is to be read on the page: no markup, one blank between words."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", answer.body.decode().replace("<wbr>", ""))).split())


@dataclass(frozen=True)
class Reader:
    """Asks for pages as a browser does, with the key in its cookie."""

    client: Client
    key: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {"Cookie": f"{COOKIE}={self.key}"} if self.key else {}

    def get(self, path: str, **headers: str) -> Answer:
        return self.client.get(path, headers=self.headers | {n.replace("_", "-"): v for n, v in headers.items()})

    def post(self, path: str, form: str = "", **headers: str) -> Answer:
        given = {"Content-Type": "application/x-www-form-urlencoded"} | self.headers
        return self.client.ask(
            "POST", path, raw=form.encode(), headers=given | {n.replace("_", "-"): v for n, v in headers.items()}
        )

    def shown(self, path: str) -> str:
        answer = self.get(path)
        assert answer.status == 200, answer.body
        assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
        return text(answer)

    def with_key(self, key: str | None) -> Reader:
        return Reader(self.client, key)


class LivePage:
    """An open stream of a page: each event is its name and its data."""

    def __init__(self, reader: Reader, path: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", reader.client.port, timeout=PATIENCE)
        self._connection.request("GET", path, headers=reader.headers | {"Sec-Fetch-Mode": "cors"})
        self._answer = self._connection.getresponse()
        self.status, self.headers = self._answer.status, self._answer.headers

    def next(self) -> tuple[str, str] | None:
        """The next event that is not a comment; None: the stream has come to its proper end."""
        name, data = "", []
        while line := self._answer.readline().decode():
            field, _, value = line.rstrip("\n").partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                data.append(value)
            elif not field and (name or data):
                return name, "\n".join(data)
        assert self._answer.isclosed(), "cut off in the middle"
        return None

    def close(self) -> None:
        self._answer.close()
        self._connection.close()


def page_routes(app: FastAPI) -> list[Page]:
    return [route.original_route for route in iter_route_contexts(app.routes) if isinstance(route.original_route, Page)]
