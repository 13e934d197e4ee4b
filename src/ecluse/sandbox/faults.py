"""Fault rules: their fields, and the decision which calls they hit.

Whether a call is hit depends on the seed, the rule's number, the record and the number of that record's earlier calls,
never on arrival order: a run under concurrency repeats exactly. (``times`` and ``after`` count over all records, so
only they depend on which call came first.) How a fault looks on the wire is in ``wire.py``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

REQUIRED = object()


class RuleError(ValueError):
    """A fault rule or limit that cannot be accepted; the message says why."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a rule: its default, a description of valid values (for messages), and the check of a value."""

    default: object
    expected: str
    accepts: Callable[[Any], bool]


def is_number(value: object) -> bool:
    """Return True for a finite number from 0 on."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def is_count(value: object) -> bool:
    """Return True for a whole number from 0 on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def is_header(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def seconds(default: object) -> Field:
    """Return a field that holds a number of seconds."""
    return Field(default, "a number of seconds", is_number)


def status(default: int) -> Field:
    """Return a field that holds an HTTP status of a refusal."""
    return Field(default, "an HTTP status from 400 to 599", lambda value: is_count(value) and 400 <= value <= 599)


COMMON = {
    "rate": Field(1, "a number from 0 to 1", lambda value: is_number(value) and value <= 1),
    "ids": Field(None, "a list of record ids", lambda value: value is None or is_strings(value)),
    "methods": Field(None, "a list of HTTP methods", lambda value: value is None or is_strings(value)),
    "times": Field(None, "a whole number", lambda value: value is None or is_count(value)),
    "after": Field(0, "a whole number", is_count),
    "per_id_times": Field(None, "a whole number", lambda value: value is None or is_count(value)),
}

KINDS: dict[str, dict[str, Field]] = {
    "throttle": {
        "retry_after": Field(
            1,
            'seconds, "date", null or a raw text',
            lambda value: value is None or is_number(value) or is_header(value),
        ),
        "seconds": seconds(1),
        "concurrency": Field(False, "true or false", lambda value: isinstance(value, bool)),
    },
    "refused": {"status": status(400), "code": Field(REQUIRED, "a code", is_header)},
    "server_error": {"status": status(503)},
    "timeout": {"seconds": seconds(60)},
    "slow_body": {
        "chunk": Field(16, "a number of bytes from 1", lambda value: is_count(value) and value > 0),
        "delay": seconds(0.05),
    },
    "truncated": {},
    "invalid_json": {},
    "wrong_shape": {},
    "nul_byte": {},
    "bad_unicode": {},
    "huge_body": {
        "bytes": Field(10_000_000, "a number of bytes from 16", lambda value: is_count(value) and value > 15)
    },
    "applied_then_error": {"status": status(500)},
    "applied_then_reset": {},
    "reset": {},
    "not_found": {},
    "unauthorized": {},
    "redirect": {"location": Field(REQUIRED, "a location", is_header)},
    "chat_refusal": {},
    "chat_length": {},
    "chat_filtered": {},
    "chat_broken": {},
    "chat_empty": {},
    "latency": {"seconds": seconds(REQUIRED)},
}


@dataclass(slots=True)
class Rule:
    """A fault rule in force, with the number of calls that it matched and hit. `given` is the rule as it was posted."""

    id: int
    given: dict[str, Any]
    kind: str
    vendor: str | None
    rate: float
    ids: frozenset[str] | None
    methods: frozenset[str] | None
    times: int | None
    after: int
    per_id_times: int | None
    details: dict[str, Any]
    matched: int = 0
    hits: int = 0
    hits_by_subject: Counter[str] = field(default_factory=Counter)

    def as_json(self) -> dict[str, Any]:
        """Return the rule as it was posted, with its number."""
        return {"id": self.id, **self.given}

    def hit(self, seed: int, vendor: str, method: str, subject: str, earlier_calls: int) -> bool:
        """Decide whether this rule hits the call, and count it. `subject` is the record that the call is about,
        `earlier_calls` the number of calls about it before this one."""
        if (
            (self.vendor is not None and self.vendor != vendor)
            or (self.methods is not None and method not in self.methods)
            or (self.ids is not None and subject not in self.ids)
        ):
            return False
        self.matched += 1
        if (
            self.matched <= self.after
            or (self.times is not None and self.hits >= self.times)
            or (self.per_id_times is not None and self.hits_by_subject[subject] >= self.per_id_times)
            or draw(seed, self.id, subject, earlier_calls) >= self.rate
        ):
            return False
        self.hits += 1
        self.hits_by_subject[subject] += 1
        return True


def draw(seed: int, rule_id: int, subject: str, earlier_calls: int) -> float:
    """Return a number in [0, 1) that depends on the arguments only."""
    drawn = blake2b(
        f"{seed}/{rule_id}/{earlier_calls}/{subject}".encode(errors="backslashreplace"), digest_size=6
    ).digest()
    return int.from_bytes(drawn) / 2**48


def read_fields(noun: str, known: dict[str, Field], given: dict[str, Any], also: Collection[str]) -> dict[str, Any]:
    """Return the values of the known fields, with defaults. Raise RuleError for an invalid value, and for a field that
    is neither known nor in `also`. `noun` names the object in messages."""
    for name in given:
        if name not in known and name not in also:
            raise RuleError(f"{name}: not a field of {noun}")
    values = {name: given.get(name, spec.default) for name, spec in known.items()}
    for name, spec in known.items():
        if values[name] is REQUIRED or not spec.accepts(values[name]):
            raise RuleError(f"{name}: {noun} needs {spec.expected}")
    return values


def parse_rule(rule_id: int, given: object, vendors: Collection[str]) -> Rule:
    """Parse a fault rule as it was posted; `rule_id` becomes its number. Raise RuleError if it is invalid."""
    if not isinstance(given, dict):
        raise RuleError(f"a fault rule must be an object, not {given!r}")
    kind, vendor = given.get("kind"), given.get("vendor")
    if not isinstance(kind, str) or kind not in KINDS:
        raise RuleError(f"kind: {kind!r} is not one of {', '.join(KINDS)}")
    if vendor is not None and vendor not in list(vendors):
        raise RuleError(f"vendor: {vendor!r} is not one of {', '.join(vendors)}")
    known = COMMON | KINDS[kind]
    values = read_fields(f"a {kind} rule", known, given, ("kind", "vendor"))
    return Rule(
        id=rule_id,
        given=given,
        kind=kind,
        vendor=vendor,
        rate=values["rate"],
        ids=None if values["ids"] is None else frozenset(values["ids"]),
        methods=None if values["methods"] is None else frozenset(method.upper() for method in values["methods"]),
        times=values["times"],
        after=values["after"],
        per_id_times=values["per_id_times"],
        details={name: values[name] for name in KINDS[kind]},
    )


class FaultBook:
    """The fault rules in force, in the order in which they were added."""

    def __init__(self, seed: int, vendors: Collection[str]) -> None:
        self.rules: list[Rule] = []
        self._seed = seed
        self._vendors = vendors
        self._last_id = 0
        self._calls: Counter[tuple[str, str]] = Counter()

    def add(self, given: object) -> list[Rule]:
        """Add one rule or a list of rules, and return them with their numbers. Raise RuleError if one is invalid: then
        none is added."""
        listed = given if isinstance(given, list) else [given]
        rules = [parse_rule(self._last_id + n, rule, self._vendors) for n, rule in enumerate(listed, 1)]
        self._last_id += len(rules)
        self.rules += rules
        return rules

    def remove(self, rule_id: int) -> bool:
        """Delete a rule; return False if there is none with this number."""
        before = len(self.rules)
        self.rules = [rule for rule in self.rules if rule.id != rule_id]
        return len(self.rules) < before

    def clear(self) -> None:
        """Delete all rules. Numbering restarts, so that the same rules, added again, hit the same way."""
        self.rules = []
        self._last_id = 0

    def pick(self, vendor: str, method: str, subject: str) -> tuple[Rule | None, float]:
        """Count a call about the record `subject`, and return the rule that hits it and the latency to add, in seconds.
        The rule is the first one that hits and is not of kind latency; without one, the last latency rule that hits;
        else None."""
        earlier_calls = self._calls[vendor, subject]
        self._calls[vendor, subject] = earlier_calls + 1
        latency, slowed_by = 0.0, None
        for rule in self.rules:
            if not rule.hit(self._seed, vendor, method, subject, earlier_calls):
                continue
            if rule.kind != "latency":
                return rule, latency
            latency += rule.details["seconds"]
            slowed_by = rule
        return slowed_by, latency
