"""Encryption of stored secrets with a new key, and of webhook URLs that earlier versions stored in plain text; of those
only the origin stays readable.

Work is done batch by batch. Each batch is one transaction, and an encrypted row is not touched again: after a crash the
next call continues. The column `updated_at` of a secret is not changed: it says when its value was changed.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from ecluse.access.secrets import Secrets
from ecluse.base.crash import crashpoint
from ecluse.base.masking import ORIGIN_ENDS, origin_of
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_rows

BATCH = 100
DELIVERIES = 1_000

OTHERS = """
SELECT tenant_id, name, key_id, nonce, ciphertext FROM secrets WHERE key_id <> %s
ORDER BY tenant_id, name LIMIT %s FOR UPDATE
"""
RESEAL = "UPDATE secrets SET key_id = %s, nonce = %s, ciphertext = %s WHERE tenant_id = %s AND name = %s"


class Plain(NamedTuple):
    """A column with webhook URLs. `find` selects and locks rows (tenant, id, URL) whose URL is in plain text, `hide`
    stores the origin in its place, `secret` is the name of the secret that holds the URL."""

    find: str
    hide: str
    secret: str


PLAIN = (
    Plain(
        "SELECT tenant_id, id, url FROM notification_endpoints WHERE kind = 'webhook' AND right(url, %s) <> %s"
        " ORDER BY id LIMIT %s FOR NO KEY UPDATE",
        "UPDATE notification_endpoints SET url = %s WHERE id = %s",
        "webhook:{}:url",
    ),
    Plain(
        "SELECT s.tenant_id, a.id, a.webhook_url FROM automation_settings a JOIN schedules s ON s.id = a.id"
        " WHERE right(a.webhook_url, %s) <> %s ORDER BY s.id LIMIT %s FOR NO KEY UPDATE",
        "UPDATE automation_settings SET webhook_url = %s WHERE id = %s",
        "schedule:{}:webhook:url",
    ),
)
# `origin_of` in SQL. A webhook without an endpoint is that of the schedule whose run it is about.
HIDE_DELIVERIES = f"""
WITH batch AS (
    SELECT d.run_id, r.schedule_id FROM deliveries d LEFT JOIN runs r ON r.id = d.about_run
    WHERE d.run_id > %s ORDER BY d.run_id LIMIT {DELIVERIES}),
hidden AS (
    UPDATE deliveries d
    SET url_name = CASE WHEN endpoint_id IS NULL THEN 'schedule:' || schedule_id || ':webhook:url' END,
        recipient = regexp_replace(recipient, '^([^:/?#]+)://(?:[^/?#]*@)?([^/?#]*).*$', '\\1://\\2{ORIGIN_ENDS}')
    FROM batch WHERE batch.run_id = d.run_id AND d.kind = 'webhook' AND d.recipient NOT LIKE '%%{ORIGIN_ENDS}'
    RETURNING 1)
SELECT max(run_id), (SELECT count(*) FROM hidden) FROM batch
"""  # noqa: S608 - our own words


async def rotate(connection: Connection, secrets: Secrets) -> int:
    """Encrypt every secret with the current key; return the number of those that were encrypted with another one. Raise
    SetUpError if a secret cannot be decrypted with the keys of `secrets`."""
    done = 0
    while True:
        async with connection.transaction():
            rows = await fetch_rows(connection, OTHERS, (secrets.key_id, BATCH))
            for tenant, name, *sealed in rows:
                value = secrets.opened(tenant, name, *sealed)
                await connection.execute(RESEAL, (*secrets.sealed(tenant, name, value), tenant, name))
            crashpoint("in rotation")
        crashpoint("after rotation")
        done += len(rows)
        if len(rows) < BATCH:
            return done


async def seal_urls(connection: Connection, secrets: Secrets) -> Counter[str]:
    """Encrypt the webhook URLs that are stored in plain text, then replace URLs in the log of deliveries by their
    origin; return the number of each."""
    done: Counter[str] = Counter()
    for plain in PLAIN:
        while rows := await _seal_some(connection, secrets, plain):
            done["webhook URLs"] += rows
    last: int | None = 0
    while last is not None:
        ((last, hidden),) = await fetch_rows(connection, HIDE_DELIVERIES, (last,))
        done["deliveries"] += hidden
    return done


async def _seal_some(connection: Connection, secrets: Secrets, plain: Plain) -> int:
    async with connection.transaction():
        rows = await fetch_rows(connection, plain.find, (len(ORIGIN_ENDS), ORIGIN_ENDS, BATCH))
        for tenant, number, url in rows:
            await secrets.put(connection, tenant, plain.secret.format(number), url)
            await connection.execute(plain.hide, (origin_of(url), number))
    return len(rows)
