"""Rate caps at the vendor: token buckets and in-flight caps, one per vendor or per value of a header.

Every limit posted applies; a call over any of them is refused and takes no token from the others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ecluse.sandbox.faults import Field, RuleError, is_count, is_number, read_fields


def is_rate(value: object) -> bool:
    return value is None or (is_number(value) and value != 0)


FIELDS = {
    "per_second": Field(None, "a number above 0", is_rate),
    "per_minute": Field(None, "a number above 0", is_rate),
    "burst": Field(None, "a whole number from 1", lambda value: value is None or (is_count(value) and value > 0)),
    "concurrency": Field(None, "a whole number", lambda value: value is None or is_count(value)),
    "by": Field(
        None,
        '"header NAME" or null',
        lambda value: value is None or (isinstance(value, str) and value.startswith("header ") and len(value) > 7),
    ),
    "retry_after": Field(True, "true or false", lambda value: isinstance(value, bool)),
}


@dataclass(slots=True)
class Bucket:
    """The state of one limit for one value of its header: tokens at the instant `at`, calls in flight."""

    tokens: float
    at: float
    in_flight: int = 0


@dataclass(slots=True)
class Limit:
    """A limit as posted (`given`) and parsed, with its buckets by value of the header (one bucket if it names none)."""

    given: dict[str, Any]
    vendor: str
    per_second: float | None
    burst: float
    concurrency: int | None
    header: str | None
    retry_after: bool
    buckets: dict[str, Bucket] = field(default_factory=dict)

    def bucket(self, headers: Mapping[str, str], now: float) -> Bucket:
        """Return the bucket of a call with these headers, filled up to the present."""
        name = headers.get(self.header, "") if self.header is not None else ""
        bucket = self.buckets.get(name)
        if bucket is None:
            bucket = self.buckets[name] = Bucket(self.burst, now)
        elif self.per_second is not None:
            bucket.tokens = min(self.burst, bucket.tokens + (now - bucket.at) * self.per_second)
            bucket.at = now
        return bucket

    def full(self, bucket: Bucket) -> bool:
        """Return True if the bucket has as many calls in flight as the cap allows."""
        return self.concurrency is not None and bucket.in_flight >= self.concurrency

    def wait(self, bucket: Bucket) -> float:
        """Return the seconds until this bucket admits a call (1 if too many calls are in flight); 0 if it admits one
        now."""
        if self.full(bucket):
            return 1.0
        if self.per_second is not None and bucket.tokens < 1:
            return (1 - bucket.tokens) / self.per_second
        return 0.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """The refusal of a call over a cap; `retry_after` in seconds, None if the cap sends none."""

    retry_after: int | None
    concurrency: bool  # too many at once, rather than too fast


def parse_limit(given: object, vendors: Collection[str]) -> Limit:
    """Parse a limit as it was posted. Raise RuleError if it is invalid; the message names the field, if one is at
    fault."""
    if not isinstance(given, dict):
        raise RuleError(f"a limit must be an object, not {given!r}")
    if given.get("vendor") not in list(vendors):
        raise RuleError(f"vendor: {given.get('vendor')!r} is not one of {', '.join(vendors)}")
    values = read_fields("a limit", FIELDS, given, ("vendor",))
    per_second, per_minute = values["per_second"], values["per_minute"]
    if per_second is not None and per_minute is not None:
        raise RuleError("per_minute: a limit has per_second or per_minute, not both")
    rate = per_second if per_minute is None else per_minute
    if rate is None and values["concurrency"] is None:
        raise RuleError("per_second: a limit needs per_second, per_minute or concurrency")
    return Limit(
        given=given,
        vendor=given["vendor"],
        per_second=rate if per_minute is None else per_minute / 60,
        burst=values["burst"] or max(1, rate or 1),
        concurrency=values["concurrency"],
        header=values["by"].removeprefix("header ") if values["by"] is not None else None,
        retry_after=values["retry_after"],
    )


class Limits:
    """The limits in force, of all vendors."""

    def __init__(self, vendors: Collection[str]) -> None:
        self.limits: list[Limit] = []
        self._vendors = vendors

    def add(self, given: object) -> None:
        self.limits.append(parse_limit(given, self._vendors))

    def clear(self) -> None:
        self.limits = []

    def enter(self, vendor: str, headers: Mapping[str, str], now: float) -> list[Bucket] | Refusal:
        """Admit a call: return the buckets it holds, to be released with ``leave``, or the refusal."""
        held = []
        for limit in self.limits:
            if limit.vendor == vendor:
                bucket = limit.bucket(headers, now)
                wait = limit.wait(bucket)
                if wait > 0:
                    return Refusal(max(1, math.ceil(wait)) if limit.retry_after else None, limit.full(bucket))
                held.append(bucket)
        for bucket in held:
            bucket.tokens -= 1
            bucket.in_flight += 1
        return held

    def leave(self, held: list[Bucket]) -> None:
        """Release the buckets that `enter` returned, when the call is answered."""
        for bucket in held:
            bucket.in_flight -= 1
