"""`Idempotency-Key`: a request repeated within a day gets the answer of the first one and starts nothing.

The key, the effects of the request and the stored answer are one transaction: a crash leaves all of them or none. A
repetition that arrives while the first request is in progress is answered at once: it must not hold a connection for as
long as the first one takes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastapi import Request, Response

from ecluse.access import answers
from ecluse.access.door import caller_of
from ecluse.access.envelope import JSON, Refused
from ecluse.access.wire import reads_of
from ecluse.base.errors import InvalidInput
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_column, fetch_rows
from ecluse.db.shares import Writes
from ecluse.retention.kinds import Aged

REFUSES = ("IN_PROGRESS", "IDEMPOTENCY_KEY_REUSED")  # codes of routes that take a key
KEY = re.compile(r"[\x21-\x7e]{1,200}")
KEPT = Aged("idempotency keys", "idempotency_keys", "t.created_at", order="created_at", type="timestamptz")

# A key that is older than a day may be used for a new request. The lock is that of the request in progress: without it
# the statement would wait at the key's index entry.
TAKE = """
INSERT INTO idempotency_keys AS k (tenant_id, key, request, created_at)
SELECT %(tenant)s, g.key, g.asked, ecluse_now() FROM unnest(%(keys)s::text[], %(asked)s::bytea[]) AS g(key, asked)
WHERE pg_try_advisory_xact_lock(hashtextextended('idempotency ' || %(tenant)s || ' ' || g.key, 0))
ON CONFLICT (tenant_id, key) DO UPDATE SET request = excluded.request, status = NULL, answer = NULL,
    created_at = excluded.created_at WHERE k.created_at < ecluse_now() - interval '24 hours'
RETURNING key
"""
STORED = """
SELECT key, request, status, answer::text FROM idempotency_keys
WHERE tenant_id = %s AND key = ANY(%s) AND created_at >= ecluse_now() - interval '24 hours'
"""
# In binary: as text, psycopg escapes each quote of an answer in an array, which held the event loop for 0.1 s per MB.
STORE = """
UPDATE idempotency_keys k SET status = g.status, answer = g.answer::jsonb
FROM unnest(%s::text[], %s::int[], %b::text[]) AS g(key, status, answer) WHERE k.tenant_id = %s AND k.key = g.key
"""


class Call(NamedTuple):
    """A request that changes something. `given`: the parameters of its route; `prepared`: the result of the operation's
    `before`; `key`: its Idempotency-Key; `digest`: the hash of method, path and, if it has a key, body."""

    request: Request
    given: Mapping[str, Any]
    prepared: Any
    key: str | None
    digest: bytes

    @property
    def reason(self) -> str | None:
        """The field `reason` of its body, for the audit trail; None if there is none."""
        return getattr(self.given.get("body"), "reason", None)


@dataclass(frozen=True)
class Answer:
    """The answer to a request. The fields in `once` are not stored: a repeated request is answered with `body`
    alone."""

    status: int
    body: Mapping[str, Any]
    once: Mapping[str, Any] = field(default_factory=dict)
    after: Callable[[], Awaitable[Mapping[str, Any]]] | None = None  # called after the commit: its answer is shown


Outcome = Answer | Response | Refused  # a response is that of an earlier request with the same key
Do = Callable[[Connection, Sequence[Call]], Awaitable[Sequence[Answer]]]


def key_of(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and not KEY.fullmatch(key):
        raise InvalidInput("An Idempotency-Key is 1 to 200 visible ASCII characters.")
    return key


async def call_of(request: Request, given: Mapping[str, Any], prepared: Any) -> Call:
    key = key_of(request)
    body = b"" if key is None else await request.body()  # not while a connection is held: its client may be slow
    digest = hashlib.sha256(f"{request.method} {request.url.path}\n".encode() + body).digest()
    return Call(request, given, prepared, key, digest)


async def carry_out(writes: Writes, tenant: str, calls: Sequence[Call], do: Do) -> list[Outcome]:
    """Carry out calls of one tenant with `do`, in one transaction; return their outcomes, in the order of the calls. A
    call whose Idempotency-Key was used before is not passed to `do`: its outcome is the stored answer or a refusal."""
    outcomes: dict[int, Outcome] = {}
    async with writes.connection(tenant) as connection, connection.transaction():
        if any(call.key is not None for call in calls):
            outcomes |= await _replays(connection, tenant, calls)
        left = [n for n in range(len(calls)) if n not in outcomes]
        done = dict(zip(left, await do(connection, [calls[n] for n in left]), strict=True)) if left else {}
        kept = []
        for n, answer in done.items():
            key, request = calls[n].key, calls[n].request
            outcomes[n] = answer
            if key is not None or answer.after is None:  # before the commit: an answer that is too large is refused
                text = await answers.encoded(request, answer.body)
                kept += [(key, answer.status, text.decode())] if key is not None else []
                if answer.after is None and not answer.once:
                    outcomes[n] = Response(text, answer.status, media_type=JSON)
        if kept:
            await connection.execute(STORE, (*map(list, zip(*kept, strict=True)), tenant))
    return [outcomes[n] for n in range(len(calls))]


async def response(call: Call, outcome: Outcome) -> Response:
    """Return the response for an outcome of `carry_out`, after calling the `after` of an answer that has one; raise the
    outcome if it is a refusal."""
    if isinstance(outcome, Refused):
        raise outcome
    if isinstance(outcome, Response):
        return outcome
    body = {**outcome.body, **outcome.once} if outcome.after is None else await outcome.after()
    return Response(await answers.encoded(call.request, body), outcome.status, media_type=JSON)


async def replayed(request: Request) -> Response | None:
    """Return the stored answer for a request that was answered before under the same Idempotency-Key; None if it was
    not. Raise Refused if the key was used for another request."""
    call, tenant = await call_of(request, {}, None), caller_of(request).tenant
    rows = await reads_of(request)(lambda connection: fetch_rows(connection, STORED, (tenant, [call.key])))
    return await response(call, _replay(call, rows[0][1:])) if rows else None


async def _replays(connection: Connection, tenant: str, calls: Sequence[Call]) -> dict[int, Outcome]:
    """Claim the Idempotency-Keys of the calls for this transaction. Return the outcomes, by index, of calls whose key
    was used before, by another request or by an earlier one of the calls."""
    first = {call.key: call for call in reversed(calls) if call.key is not None}
    given = {"tenant": tenant, "keys": list(first), "asked": [call.digest for call in first.values()]}
    taken = set(await fetch_column(connection, TAKE, given))
    others = {n: call for n, call in enumerate(calls) if call.key not in taken or call is not first[call.key]}
    others = {n: call for n, call in others.items() if call.key is not None}
    rows = await fetch_rows(connection, STORED, (tenant, [call.key for call in others.values()])) if others else []
    stored = {key: found for key, *found in rows}
    return {n: _replay(call, stored.get(call.key)) for n, call in others.items()}


def _replay(call: Call, stored: Sequence[Any] | None) -> Outcome:
    if stored is None or stored[1] is None:
        says = "The first request with this Idempotency-Key is still in progress: repeat this one in a second."
        return Refused(409, "IN_PROGRESS", says, {"Retry-After": "1"})
    digest, status, text = stored
    if digest != call.digest:
        message = "This Idempotency-Key was used for another request (the bytes of its body count): use a new key."
        return Refused(422, "IDEMPOTENCY_KEY_REUSED", message)
    return Response(text, status, {"Idempotent-Replay": "true"}, JSON)
