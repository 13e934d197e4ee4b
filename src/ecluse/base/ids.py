"""Ids. Most are computed, not random: the same decision made twice gives the same id, so that a repetition is a
no-op."""

from __future__ import annotations

import json
import os
import re
import socket
import uuid

EFFECTS = uuid.UUID("7e1f3c52-6f0b-5d0e-9d3a-0b6c6ecb5a01")
CUID = re.compile("c[0-9a-z]{24}")


def workflow_id(tenant_id: str, event_key: str) -> str:
    """Return the id of the workflow that leads the run with this event key."""
    return f"{tenant_id}/{event_key}"


def retry_id(event_id: str, round_: int) -> str:
    """Return the event id of a round (0 is the first): a deliberate repetition is a new event, a replay of the same
    round is not."""
    return event_id if round_ == 0 else f"{event_id}-retry-{round_}"


def item_event_id(flow: str, run_id: int, stage: str, key: str, round_: int) -> str:
    """Return the event id of an item, for people and logs. Fan-out events are the item rows, so their ids are computed,
    not stored. A vendor's idempotency key hashes the parts instead, since the parts may contain dashes."""
    return retry_id(f"{flow}-{run_id}-{stage}-{key}", round_)


def effect_id(tenant_id: str, event_key: str, stage: str, key: str, round_: int) -> uuid.UUID:
    """Return the id of a wanted write, the same in every attempt, so that the vendor can distinguish a retry from a
    second write. It is computed from the run's event key, not from its id: a run that is lost because the database lost
    its last seconds is started again under the same key."""
    return uuid.uuid5(EFFECTS, json.dumps([tenant_id, event_key, stage, key, round_]))


def uuid7(milliseconds: int) -> uuid.UUID:
    """Return a random UUID of version 7, which sorts by time; `milliseconds` is its time, since the epoch."""
    lot = int.from_bytes(os.urandom(10))
    return uuid.UUID(int=milliseconds << 80 | 0x7 << 76 | (lot >> 62 & 0xFFF) << 64 | 0b10 << 62 | lot & (1 << 62) - 1)


def cuid(milliseconds: int) -> str:
    """Return a random id in the form of a cuid, which sorts by time: the letter c and 24 digits in base 36. The first
    eight digits are `milliseconds`, its time since the epoch."""
    return "c" + _base36(milliseconds, 8) + _base36(int.from_bytes(os.urandom(11)), 16)


def _base36(number: int, digits: int) -> str:
    text = ""
    for _ in range(digits):
        number, digit = divmod(number, 36)
        text = "0123456789abcdefghijklmnopqrstuvwxyz"[digit] + text
    return text


def replica_id() -> str:
    """Return an id unique per process start: a restarted process must never be taken for its predecessor."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
