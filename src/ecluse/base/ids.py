"""Names that are computed, never drawn: the same decision taken twice gives the same id, so a repeat is a no-op."""

from __future__ import annotations

import json
import os
import socket
import uuid

EFFECTS = uuid.UUID("7e1f3c52-6f0b-5d0e-9d3a-0b6c6ecb5a01")


def workflow_id(tenant_id: str, event_key: str) -> str:
    return f"{tenant_id}/{event_key}"


def retry_id(event_id: str, round_: int) -> str:
    """A deliberate repetition is a new event; a replay of the same repetition is not."""
    return event_id if round_ == 0 else f"{event_id}-retry-{round_}"


def item_event_id(flow: str, run_id: int, stage: str, key: str, round_: int) -> str:
    """Fan-out events are the item rows: their ids are computed, not stored per event. For people and logs; a vendor's
    idempotency key hashes the parts instead, since these words may contain dashes."""
    return retry_id(f"{flow}-{run_id}-{stage}-{key}", round_)


def effect_id(tenant_id: str, event_key: str, stage: str, key: str, round_: int) -> uuid.UUID:
    """A wanted write, the same in every attempt, so that the vendor can tell a repetition from a second wish. Of the
    run's event key and not its id: a run that is lost with a database's last seconds comes back under the same key."""
    return uuid.uuid5(EFFECTS, json.dumps([tenant_id, event_key, stage, key, round_]))


def uuid7(milliseconds: int) -> uuid.UUID:
    """Drawn by lot, but in the order of time."""
    lot = int.from_bytes(os.urandom(10))
    return uuid.UUID(int=milliseconds << 80 | 0x7 << 76 | (lot >> 62 & 0xFFF) << 64 | 0b10 << 62 | lot & (1 << 62) - 1)


def replica_id() -> str:
    """Unique per process start: a restarted process must never be taken for its predecessor."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
