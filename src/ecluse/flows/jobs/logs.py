"""Logs of attempts, in chunks. An agent counts the characters that it has sent; what is stored has its secrets hidden,
and ends at a limit."""

from __future__ import annotations

import json

from ecluse.access.envelope import Refused
from ecluse.access.secrets import Secrets
from ecluse.base.masking import hidden_texts, without_texts
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_row

LARGEST_CHUNK, LARGEST_LOG = 65_536, 1_048_576  # characters

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
    shown = without_texts(new[: max(0, LARGEST_LOG - length)], hidden)
    end = length + len(new)
    given = {"run": run_id, "tenant": tenant, "start": length, "text": shown, "length": end}
    await connection.execute(APPEND, {**given, "capped": end > LARGEST_LOG})
    return end, end >= LARGEST_LOG


async def secrets_of(connection: Connection, secrets: Secrets | None, tenant: str, name: str | None) -> list[str]:
    """Return the texts in a sealed payload that must not be shown."""
    if name is None or secrets is None:
        return []
    return hidden_texts(json.loads(await secrets.get(connection, tenant, name)))
