"""Logs of attempts, in chunks. An agent counts the characters that it has sent; the stored log has its secrets hidden,
and is cut at LARGEST_LOG."""

from __future__ import annotations

import json

from ecluse.access.envelope import Refused
from ecluse.access.secrets import Secrets
from ecluse.base.masking import hidden_texts, without_texts
from ecluse.db.connect import Connection
from ecluse.flows.jobs.attempts import Open

LARGEST_CHUNK, LARGEST_LOG = 65_536, 1_048_576  # characters

APPEND = """
WITH chunk AS (
    INSERT INTO job_logs (job_run_id, tenant_id, start, text, at)
    SELECT %(run)s, %(tenant)s, %(start)s, %(text)s, ecluse_now() WHERE %(text)s <> '')
UPDATE job_runs SET log_length = %(length)s, log_capped = log_capped OR %(capped)s WHERE id = %(run)s
"""


async def append(connection: Connection, attempt: Open, hidden: list[str], offset: int, text: str) -> tuple[int, bool]:
    """Append to the log of a locked attempt, with these secrets hidden; return the next offset, and whether the log is
    full. Text that was sent before is left out. Raise Refused (409) if text before `offset` is missing."""
    length = attempt.log_length
    if offset > length:
        missing = [{"where": "offset", "problem": str(length)}]
        raise Refused(409, "LOG_GAP", f"The log ends at {length}: send it from there.", details=missing)
    new = text[length - offset :]
    if not new:
        return length, length >= LARGEST_LOG
    shown = without_texts(new[: max(0, LARGEST_LOG - length)], hidden)
    end = length + len(new)
    given = {"run": attempt.run_id, "tenant": attempt.tenant_id, "start": length, "text": shown, "length": end}
    await connection.execute(APPEND, {**given, "capped": end > LARGEST_LOG})
    return end, end >= LARGEST_LOG


async def secrets_of(connection: Connection, secrets: Secrets | None, attempt: Open) -> list[str]:
    """Return the secrets in the encrypted payload of an attempt's job, which must not be shown."""
    if attempt.payload_secret is None or secrets is None:
        return []
    opened = await secrets.get_all(connection, attempt.tenant_id, [attempt.payload_secret])
    return [text for one in opened.values() for text in hidden_texts(json.loads(one))]
