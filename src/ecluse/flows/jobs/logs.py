"""Logs of attempts, in chunks. An agent counts the characters that it has sent; what is stored has its secrets hidden,
and ends at a limit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ecluse.access.envelope import Refused
from ecluse.access.secrets import Secrets
from ecluse.base.masking import HIDDEN, LONGEST, masked, without_secrets
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_row

LARGEST_CHUNK, LARGEST_LOG = 65_536, 1_048_576  # characters
SHORTEST_SECRET = 4  # characters; a shorter text would be hidden everywhere

FACTS = """
SELECT r.log_length, j.payload_secret FROM job_runs r JOIN jobs j ON j.id = r.job_id WHERE r.id = %s
"""
APPEND = """
WITH chunk AS (
    INSERT INTO job_logs (job_run_id, tenant_id, start, text, at)
    SELECT %(run)s, %(tenant)s, %(start)s, %(text)s, ecluse_now() WHERE %(text)s <> '')
UPDATE job_runs SET log_length = %(length)s, log_capped = log_capped OR %(capped)s WHERE id = %(run)s
"""


async def append(
    connection: Connection, secrets: Secrets | None, tenant: str, run_id: str, offset: int, text: str
) -> tuple[int, bool]:
    """Append to the log of an attempt, whose row is locked; return the offset of what follows, and whether the log is
    full. What was sent before is left out; Refused names the offset at which something is missing."""
    length, secret = await fetch_row(connection, FACTS, (run_id,)) or (0, None)
    if offset > length:
        missing = [{"where": "offset", "problem": str(length)}]
        raise Refused(409, "LOG_GAP", f"The log ends at {length}: send it from there.", details=missing)
    new = text[length - offset :]
    if not new:
        return length, length >= LARGEST_LOG
    hidden = await secrets_of(connection, secrets, tenant, secret)
    shown = without(new[: max(0, LARGEST_LOG - length)], hidden)
    end = length + len(new)
    given = {"run": run_id, "tenant": tenant, "start": length, "text": shown, "length": end}
    await connection.execute(APPEND, {**given, "capped": end > LARGEST_LOG})
    return end, end >= LARGEST_LOG


async def secrets_of(connection: Connection, secrets: Secrets | None, tenant: str, name: str | None) -> list[str]:
    """Return the texts in a sealed payload that must not be shown, the longest first."""
    if name is None or secrets is None:
        return []
    payload = json.loads(await secrets.get(connection, tenant, name))
    return sorted({*_hidden(payload, without_secrets(payload))}, key=len, reverse=True)


def _hidden(value: Any, shown: Any) -> Iterator[str]:
    if shown == HIDDEN and value != HIDDEN:
        for text in _texts(value):
            if len(text) >= SHORTEST_SECRET:
                yield text
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _hidden(inner, shown[name])
    elif isinstance(value, list):
        for inner, also in zip(value, shown, strict=True):
            yield from _hidden(inner, also)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)
    else:
        yield str(value)


def without(value: Any, hidden: list[str]) -> Any:
    """Return a text, or the texts in a JSON value, with these secrets hidden, and others by their patterns."""
    if isinstance(value, dict):
        return without_secrets({name: without(one, hidden) for name, one in value.items()})
    if isinstance(value, list):
        return [without(one, hidden) for one in value]
    if not isinstance(value, str):
        return value
    for secret in hidden:
        value = value.replace(secret, HIDDEN)
    return "".join(masked(value[start : start + LONGEST]) for start in range(0, len(value), LONGEST))
