"""What a simulated vendor is: the call it is given, the answer it gives, the two methods it has.

A vendor is one class in one file of ``vendors/`` and one line of its registry. It only knows its own behaviour:
faults, rate caps, latency and the recording of calls happen around it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from aiohttp import web

from ecluse.sandbox.ledger import Entry, Ledger


@dataclass(slots=True)
class Call:
    request: web.BaseRequest
    ledger: Ledger
    entry: Entry
    path: str  # below the vendor's mount point
    body: bytes = b""

    @property
    def method(self) -> str:
        return self.request.method

    @property
    def query(self) -> Mapping[str, str]:
        return self.request.query

    @property
    def headers(self) -> Mapping[str, str]:
        return self.request.headers

    @property
    def subject(self) -> str:
        """What the fault rules go by: the record, else the creation asked for, else the page asked for."""
        return self.entry.ref or self.entry.key or self.entry.path

    def effect(self, ref: str, value: object, before: object = None) -> None:
        self.ledger.happened("effect", self.entry, ref, value, before)

    def paid(self, ref: str, value: object) -> None:
        """Nothing changed over here, but the caller is charged for this answer."""
        self.ledger.happened("paid", self.entry, ref, value)


@dataclass(slots=True)
class Answer:
    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


def json_answer(value: object, status: int = 200) -> Answer:
    # What is not valid UTF-8 in a client's header or body comes back as a JSON escape, which backslashreplace writes.
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return Answer(status, text.encode(errors="backslashreplace"))


def error_answer(status: int, code: str, message: str) -> Answer:
    return json_answer({"error": {"code": code, "message": message}}, status)


class Vendor(Protocol):
    def __init__(self, seed: int) -> None: ...

    def ref(self, call: Call) -> str | None:
        """The id of the record the call is about, or None when it is about no single one."""

    def error(self, status: int, code: str, message: str) -> Answer:
        """How this vendor words a refusal. Besides its own, it is asked for those that happen around it: rate_limited,
        concurrency, server_error, not_found, unauthorized, moved, and whatever a rule of kind ``refused`` names."""

    def handle(self, call: Call) -> Answer:
        """Answers the call, recording each write it applies with ``call.effect``.

        It is synchronous on purpose: nothing can come between the application of a write and its record.
        """
