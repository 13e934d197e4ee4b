"""The ledger: one entry per call received, per effect applied and per answer that was paid for, in the order they
happened.

Append-only and in memory, on one event loop, hence without locks. A call's entry is written when the call arrives and
completed when it is answered; the entry of an effect or a payment is written, complete, when it happens.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, fields
from itertools import islice


@dataclass(slots=True)
class Entry:
    """One entry of the ledger. `at` and `done_at` are seconds since the epoch, `mono` is on the monotonic clock; `key`
    is the Idempotency-Key, `client` the X-Client, `ref` the record; `call_seq` is the call that an effect or payment
    belongs to; `value` and `before` are the record's new and former value."""

    seq: int
    at: float
    mono: float
    vendor: str
    kind: str
    method: str
    path: str
    key: str | None
    client: str | None
    ref: str | None = None
    call_seq: int | None = None
    status: int | None = None
    fault: str | None = None
    value: object = None
    before: object = None
    done_at: float | None = None
    retry_after: float | None = None

    def as_json(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in FIELDS}


FIELDS = tuple(field.name for field in fields(Entry))


class Ledger:
    """The entries of the ledger since the instant `since`, and the number of calls in flight per vendor."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.since = time.time()
        self.last_seq = 0
        self.in_flight: Counter[str] = Counter()
        self.most_in_flight: Counter[str] = Counter()

    def open(self, vendor: str, method: str, path: str, key: str | None, client: str | None) -> Entry:
        """Write the entry of a call that arrives, and count it as in flight."""
        self.last_seq += 1
        entry = Entry(self.last_seq, time.time(), time.monotonic(), vendor, "call", method, path, key, client)
        self.entries.append(entry)
        self.in_flight[vendor] += 1
        if self.in_flight[vendor] > self.most_in_flight[vendor]:
            self.most_in_flight[vendor] = self.in_flight[vendor]
        return entry

    def close(self, entry: Entry) -> None:
        """Complete the entry of a call that has ended, answered or not, and no longer count it as in flight."""
        entry.done_at = time.time()
        self.in_flight[entry.vendor] -= 1

    def happened(self, kind: str, call: Entry, ref: str, value: object, before: object = None) -> None:
        """Write an entry of this kind (`effect`, `paid`) that belongs to a call."""
        self.last_seq += 1
        now = time.time()
        self.entries.append(
            Entry(
                seq=self.last_seq,
                at=now,
                mono=time.monotonic(),
                vendor=call.vendor,
                kind=kind,
                method=call.method,
                path=call.path,
                key=call.key,
                client=call.client,
                ref=ref,
                call_seq=call.seq,
                value=value,
                before=before,
                done_at=now,
            )
        )

    def clear(self) -> None:
        """Delete the entries but keep the numbering: a reader's ``after`` cursor stays valid."""
        self.entries, self.since = [], time.time()
        self.most_in_flight = self.in_flight.copy()

    def page(self, vendor: str | None, kind: str | None, after: int, limit: int | None) -> list[Entry]:
        """Return the entries after the number `after`, of this vendor and kind if given, at most `limit` if given."""
        if not self.entries:
            return []
        start = max(0, after - self.entries[0].seq + 1)
        wanted = (
            entry
            for entry in islice(self.entries, start, None)
            if (vendor is None or entry.vendor == vendor) and (kind is None or entry.kind == kind)
        )
        return list(islice(wanted, limit))

    def stats(self) -> dict[str, dict[str, object]]:
        """Return counts by vendor, as `GET /_sandbox/stats` answers."""
        by_vendor: dict[str, list[Entry]] = {}
        for entry in self.entries:
            by_vendor.setdefault(entry.vendor, []).append(entry)
        return {vendor: self._vendor_stats(vendor, entries) for vendor, entries in by_vendor.items()}

    def _vendor_stats(self, vendor: str, entries: list[Entry]) -> dict[str, object]:
        calls = [entry for entry in entries if entry.kind == "call"]
        return {
            "calls": len(calls),
            "effects": sum(entry.kind == "effect" for entry in entries),
            "by_status": Counter(str(call.status or "cut") for call in calls if call.done_at is not None),
            "by_fault": Counter(call.fault for call in calls if call.fault is not None),
            "in_flight": self.in_flight[vendor],
            "max_concurrent": self.most_in_flight[vendor],
            "first_call_at": calls[0].at if calls else None,
            "last_call_at": calls[-1].at if calls else None,
        }
