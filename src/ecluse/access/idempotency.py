"""`Idempotency-Key`: a request repeated within a day gets the answer of the first one and starts nothing.

The key, the effects of the request and the stored answer are one transaction: a crash leaves all of them or none. A
repetition that arrives while the first request is in progress is answered at once: it must not hold a connection for as
long as the first one takes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request, Response

from ecluse.access import answers
from ecluse.access.door import caller_of
from ecluse.access.envelope import JSON, Refused
from ecluse.access.wire import writes_of
from ecluse.base.errors import InvalidInput
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_row
from ecluse.retention.kinds import Aged

REFUSES = ("IN_PROGRESS", "IDEMPOTENCY_KEY_REUSED")  # codes of routes that take a key
KEY = re.compile(r"[\x21-\x7e]{1,200}")
KEPT = Aged("idempotency keys", "idempotency_keys", "t.created_at", order="created_at", type="timestamptz")

# A key that is older than a day may be used for a new request. The lock is that of the request in progress: without it
# the statement would wait at the key's index entry.
TAKE = """
INSERT INTO idempotency_keys AS k (tenant_id, key, request, created_at)
SELECT %(tenant)s, %(key)s, %(asked)s, ecluse_now()
WHERE pg_try_advisory_xact_lock(hashtextextended('idempotency ' || %(tenant)s || ' ' || %(key)s, 0))
ON CONFLICT (tenant_id, key) DO UPDATE SET request = excluded.request, status = NULL, answer = NULL,
    created_at = excluded.created_at WHERE k.created_at < ecluse_now() - interval '24 hours'
RETURNING 1
"""
STORED = """
SELECT request, status, answer::text FROM idempotency_keys
WHERE tenant_id = %s AND key = %s AND created_at >= ecluse_now() - interval '24 hours'
"""
STORE = "UPDATE idempotency_keys SET status = %s, answer = %s::jsonb WHERE tenant_id = %s AND key = %s"


@dataclass(frozen=True)
class Answer:
    """The answer to a request. The fields in `once` are not stored: a repeated request is answered with `body`
    alone."""

    status: int
    body: Mapping[str, Any]
    once: Mapping[str, Any] = field(default_factory=dict)
    after: Callable[[], Awaitable[Mapping[str, Any]]] | None = None  # called after the commit: its answer is shown


def key_of(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and not KEY.fullmatch(key):
        raise InvalidInput("An Idempotency-Key is 1 to 200 visible ASCII characters.")
    return key


async def once(request: Request, do: Callable[[Connection], Awaitable[Answer]]) -> Response:
    """Run `do` in one transaction and return its answer; if the request has an Idempotency-Key and was answered before,
    return the stored answer instead."""
    key, tenant = key_of(request), caller_of(request).tenant
    body = b"" if key is None else await request.body()  # not while a connection is held: its client may be slow
    asked = hashlib.sha256(f"{request.method} {request.url.path}\n".encode() + body).digest()
    async with writes_of(request).connection(tenant) as connection, connection.transaction():
        if key is not None:
            taken = await fetch_row(connection, TAKE, {"tenant": tenant, "key": key, "asked": asked})
            if taken is None:
                return await _replay(connection, tenant, key, asked)
        answer = await do(connection)
        text = await answers.encoded(request, answer.body)
        if key is not None:
            await connection.execute(STORE, (answer.status, text.decode(), tenant, key))
    if answer.after is not None:
        text = await answers.encoded(request, await answer.after())
    elif answer.once:
        text = await answers.encoded(request, {**answer.body, **answer.once})
    return Response(text, answer.status, media_type=JSON)


async def _replay(connection: Connection, tenant: str, key: str, asked: bytes) -> Response:
    row = await fetch_row(connection, STORED, (tenant, key))
    if row is None:
        says = "The first request with this Idempotency-Key is still in progress: repeat this one in a second."
        raise Refused(409, "IN_PROGRESS", says, {"Retry-After": "1"})
    if row[0] != asked:
        message = "This Idempotency-Key was used for another request (the bytes of its body count): use a new key."
        raise Refused(422, "IDEMPOTENCY_KEY_REUSED", message)
    return Response(row[2], row[1], {"Idempotent-Replay": "true"}, JSON)
