"""Interface of a simulated vendor: the call it receives, the answer it returns, the methods it has.

A vendor is one class in one file of ``vendors/`` and one line of its registry. It only has its own behaviour:
faults, rate caps, latency and the recording of calls are handled around it.
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
    """A call to a simulated vendor, with its entry in the ledger."""

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
        """The key that fault rules use: the id of the record, else the idempotency key, else the path."""
        return self.entry.ref or self.entry.key or self.entry.path

    def effect(self, ref: str, value: object, before: object = None) -> None:
        """Record that the call changed the record `ref` from `before` to `value`."""
        self.ledger.happened("effect", self.entry, ref, value, before)

    def paid(self, ref: str, value: object) -> None:
        """Record that the caller is charged for this answer, which changed nothing at the vendor."""
        self.ledger.happened("paid", self.entry, ref, value)


@dataclass(slots=True)
class Answer:
    """The answer of a simulated vendor."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


def json_answer(value: object, status: int = 200) -> Answer:
    """Return an answer with this value as JSON."""
    # Invalid UTF-8 from a client's header or body is returned as a JSON escape, which backslashreplace writes.
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return Answer(status, text.encode(errors="backslashreplace"))


def error_answer(status: int, code: str, message: str) -> Answer:
    """Return a refusal in the common format, for vendors without an error format of their own."""
    return json_answer({"error": {"code": code, "message": message}}, status)


def json_object(body: bytes) -> dict[str, object] | None:
    """Parse a body as a JSON object; return None if it is not one."""
    try:
        value = json.loads(body)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


class Vendor(Protocol):
    """Interface of a simulated vendor; its answers depend only on `seed` and the calls that it has received."""

    def __init__(self, seed: int) -> None: ...

    def ref(self, call: Call) -> str | None:
        """Return the id of the record the call is about, or None if it is not about a single one."""

    def error(self, status: int, code: str, message: str) -> Answer:
        """Return a refusal in this vendor's format. Also used for refusals that the sandbox decides, with the codes
        rate_limited, concurrency, server_error, not_found, unauthorized, moved, and that of a rule of kind
        ``refused``."""

    def handle(self, call: Call) -> Answer:
        """Answer the call, and record each write it applies with ``call.effect``.

        Synchronous on purpose: nothing can happen between the application of a write and its record.
        """
