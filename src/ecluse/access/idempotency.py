"""`Idempotency-Key`: a request repeated within a day gets the answer of the first one and starts nothing.

The key, the effects of the request and the stored answer are one transaction: a crash leaves all of them or none. A
repetition that arrives while the first request is in progress waits for it at the key's index entry.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psycopg
from fastapi import Request, Response
from psycopg.types.json import Jsonb

from ecluse.access.door import caller_of
from ecluse.access.envelope import Refused, as_json
from ecluse.base.errors import InvalidInput
from ecluse.db.connect import Connection, Pool
from ecluse.db.query import fetch_row
from ecluse.retention.kinds import Aged

REFUSES = ("IN_PROGRESS", "IDEMPOTENCY_KEY_REUSED")  # codes of routes that take a key
KEY = re.compile(r"[\x21-\x7e]{1,200}")
KEPT = Aged("idempotency keys", "idempotency_keys", "t.created_at", order="created_at", type="timestamptz")

# A key that is older than a day may be used for a new request.
TAKE = """
INSERT INTO idempotency_keys AS k (tenant_id, key, request, created_at) VALUES (%s, %s, %s, ecluse_now())
ON CONFLICT (tenant_id, key) DO UPDATE SET request = excluded.request, status = NULL, answer = NULL,
    created_at = excluded.created_at WHERE k.created_at < ecluse_now() - interval '24 hours'
RETURNING 1
"""
STORED = "SELECT request, status, answer FROM idempotency_keys WHERE tenant_id = %s AND key = %s"


@dataclass(frozen=True)
class Answer:
    """The answer to a request. The fields in `once` are not stored: a repeated request is answered with `body`
    alone."""

    status: int
    body: Mapping[str, Any]
    once: Mapping[str, Any] = field(default_factory=dict)

    def response(self) -> Response:
        return as_json({**self.body, **self.once}, self.status)


def key_of(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and not KEY.fullmatch(key):
        raise InvalidInput("An Idempotency-Key is 1 to 200 visible ASCII characters.")
    return key


async def once(request: Request, pool: Pool, do: Callable[[Connection], Awaitable[Answer]]) -> Response:
    """Run `do` in one transaction and return its answer; if the request has an Idempotency-Key and was answered before,
    return the stored answer instead."""
    key = key_of(request)
    async with pool.connection() as connection, connection.transaction():
        if key is None:
            return (await do(connection)).response()
        tenant = caller_of(request).tenant
        body = await request.body()
        asked = hashlib.sha256(f"{request.method} {request.url.path}\n".encode() + body).digest()
        try:
            taken = await connection.execute(TAKE, (tenant, key, asked))
        except psycopg.errors.LockNotAvailable as error:
            raise Refused(
                409,
                "IN_PROGRESS",
                "The first request with this Idempotency-Key is still in progress.",
                {"Retry-After": "1"},
            ) from error
        if await taken.fetchone() is None:
            return await _replay(connection, tenant, key, asked)
        answer = await do(connection)
        await connection.execute(
            "UPDATE idempotency_keys SET status = %s, answer = %s WHERE tenant_id = %s AND key = %s",
            (answer.status, Jsonb(answer.body), tenant, key),
        )
    return answer.response()


async def _replay(connection: Connection, tenant: str, key: str, asked: bytes) -> Response:
    row = await fetch_row(connection, STORED, (tenant, key))
    if row is None or row[0] != asked:
        message = "This Idempotency-Key was used for another request (the bytes of its body count): use a new key."
        raise Refused(422, "IDEMPOTENCY_KEY_REUSED", message)
    return as_json(row[2], row[1], {"Idempotent-Replay": "true"})
