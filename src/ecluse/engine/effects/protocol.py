"""The protocol of writes at vendors. After a crash between the vendor's acceptance and our commit, only the vendor
knows whether the write was applied, and no order of operations closes that gap. So the intent is committed before every
send, an answer that is not definite leaves the write *unknown*, and no worker reads back or sends again before the
quiet period since the last send is over: a request of a worker that has died may still be on its way.

    (none) ─┬─> sending ─┬─> applied | rejected               a definite answer
    planned ┘            ├─> planned                          not sent for sure, or refused for now: nothing was done
                         └─> unknown ── quiet, then ask ─┬─> applied | conflict | not_applied     (C2: read back)
                                                         └─> sending                              (same key again)

A crash leaves `sending`, which is treated like `unknown`. The outcome of an item that is given up while its effect is
open is marked `effect_may_exist`, and a sweep (`probe.py`) keeps reading the effect back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple
from uuid import UUID

from pydantic_core import from_json, to_json

from ecluse.base.errors import PermanentError, VendorError
from ecluse.base.text import storable
from ecluse.db.connect import Connection
from ecluse.db.query import as_json, fetch_rows
from ecluse.engine.model.item import ClaimedItem, ClaimKey, Item
from ecluse.engine.model.retry import GiveUp, Retry
from ecluse.engine.model.writes import KeyedWrite, ReadableWrite, Write

SEND_WITHIN = 1.0  # seconds from the intent to its send; up to twice as long if its commit had to be repeated
LATER = timedelta(seconds=1)
KEY_LIFE = 0.8  # the share of the vendor's promised memory of a key that is relied on
State = Literal["planned", "sending", "unknown", "applied", "rejected", "not_applied", "conflict"]
OPEN = ("sending", "unknown")


class Fenced(Exception):
    """The claim was lost: it was taken over, or the run has ended."""


class EffectState(NamedTuple):
    """The state of an effect in the database. `went`: the intent was recorded, and the write is to be sent now."""

    id: UUID
    went: bool
    state: State
    sends: int
    wanted: Any
    before: Any
    result: Any
    error: str | None
    age: timedelta | None  # since the first send
    quiet_until: datetime | None
    quiet_over: bool
    asked_at: float = 0.0  # on the loop's clock

    def ended(self, state: State, result: Any = None, error: str | None = None) -> EffectEnd:
        """Return the new state of the effect, to be stored after an execution that began with this state."""
        return EffectEnd(self.id, self.sends, state, result, error)


@dataclass(frozen=True, slots=True)
class Intent:
    """The intent to write at a vendor, which is committed before the write is sent. `again_after`: the number of
    earlier sends, if the write is sent again. `send` False: the effect is recorded as applied and nothing is sent,
    because the vendor already has the wanted value; None: the effect is only read."""

    claimed: ClaimedItem
    id: UUID
    write: Write
    wanted: Any = None
    before: Any = None
    send: bool | None = True
    again_after: int = 0
    answer: asyncio.Future[EffectState] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def row(self) -> dict[str, Any]:
        """Return the input row of the statement INTEND for this intent."""
        return {
            "id": self.id,
            "item_id": self.claimed.item.id,
            "claim_id": self.claimed.claim_id,
            "class": "C1" if isinstance(self.write, KeyedWrite) else "C2",
            "wanted": self.wanted,
            "before": self.before,
            "quiet": self.write.quiet.total_seconds(),
            "send": self.send,
            "sends": self.again_after + 1 if self.send else 0,
        }

    def reply(self, recorded: EffectState | None) -> None:
        """Give `recorded` to the execution that awaits `answer`; None: raise Fenced there, because the claim was
        lost."""
        if self.answer.done():  # the caller was cancelled
            return
        if recorded is None:
            self.answer.set_exception(Fenced())
        else:
            self.answer.set_result(recorded)

    def refuse(self, error: VendorError) -> None:
        """Raise the error in the execution that awaits `answer`, because the intent cannot be stored."""
        if not self.answer.done():
            self.answer.set_exception(error)


class EffectEnd(NamedTuple):
    """The state of an effect after an execution, stored with the item. It is not stored if the effect has been sent
    again since (`sends` is the number of sends that it is about), or is settled already."""

    id: UUID
    sends: int
    state: State
    result: Any = None
    error: str | None = None


INTEND = """
WITH clock AS MATERIALIZED (SELECT ecluse_now() AS now),
mine AS MATERIALIZED (
    SELECT t.*, i.tenant_id, i.run_id, i.stage, i.key, i.target, i.round
    FROM jsonb_to_recordset(%(rows)s::jsonb) AS t(id uuid, item_id bigint, claim_id bigint, class text, wanted jsonb,
        before jsonb, quiet double precision, send boolean, sends smallint)
    JOIN items i ON i.id = t.item_id AND i.claim_id = t.claim_id AND i.status = 'open'
    JOIN claims c ON c.id = t.claim_id JOIN unnest(%(claims)s::bigint[], %(fences)s::int[]) AS f(id, fence)
      ON c.id = f.id AND c.fence = f.fence
    WHERE EXISTS (SELECT 1 FROM replicas WHERE id = %(replica)s AND state = 'live')),
put AS (
    INSERT INTO effects AS e (id, tenant_id, run_id, item_id, stage, key, target, round, class, state, wanted, before,
                              sends, claim_id, quiet, first_send_at, last_send_at, settled_at)
    SELECT id, tenant_id, run_id, item_id, stage, key, target, round, class,
           CASE WHEN send THEN 'sending' ELSE 'applied' END, wanted, before, sends, claim_id,
           make_interval(secs => quiet), CASE WHEN send THEN now END, CASE WHEN send THEN now END,
           CASE WHEN NOT send THEN now END
    FROM mine, clock WHERE send IS NOT NULL ORDER BY id
    ON CONFLICT (id) DO UPDATE SET state = excluded.state, before = excluded.before, claim_id = excluded.claim_id,
        wanted = CASE WHEN e.state = 'planned' THEN excluded.wanted ELSE e.wanted END,
        sends = e.sends + least(excluded.sends, 1), settled_at = excluded.settled_at,
        first_send_at = coalesce(e.first_send_at, excluded.first_send_at),
        last_send_at = coalesce(excluded.last_send_at, e.last_send_at)
    WHERE e.state = 'planned' OR e.state IN ('sending', 'unknown') AND excluded.sends = e.sends + 1
      AND e.last_send_at + e.quiet <= excluded.last_send_at
    RETURNING *)
SELECT m.item_id, m.claim_id, m.id, coalesce(s.went, false), coalesce(s.state, 'planned'), coalesce(s.sends, 0),
       s.wanted, s.before, s.result, s.error, now - s.first_send_at,
       s.last_send_at + s.quiet, coalesce(s.last_send_at + s.quiet <= now, true)
FROM clock, mine m LEFT JOIN LATERAL (
    SELECT *, true AS went FROM put WHERE put.id = m.id
    UNION ALL
    -- its own intent again (the answer to the first commit was lost): valid if there is time left to send
    SELECT *, e.claim_id = m.claim_id AND e.state = 'sending' AND (m.sends = 1 OR e.sends = m.sends)
              AND now - e.last_send_at < least(e.quiet, %(send_within)s) FROM effects e
    WHERE e.id = m.id AND NOT EXISTS (SELECT 1 FROM put WHERE put.id = m.id)) s ON true
"""

# Not bound to the claim: what is certain about the last send stays true if the run has ended meanwhile. A replica that
# was declared dead stores only the effects of items accepted before in the same transaction.
SETTLE = """
UPDATE effects e SET state = t.state, result = t.result, error = t.error,
    settled_at = CASE WHEN t.state NOT IN ('planned', 'unknown') THEN ecluse_now() END
FROM jsonb_to_recordset(%(rows)s::jsonb) AS t(id uuid, sends smallint, state text, result jsonb, error text)
WHERE e.id = t.id AND e.sends = t.sends AND e.state IN ('sending', 'unknown')
  AND (EXISTS (SELECT 1 FROM replicas WHERE id = %(replica)s AND state = 'live') OR e.item_id = ANY(%(accepted)s))
"""


def as_stored_json(value: Any) -> Any:
    """Return the value as it reads after being stored as JSON, for comparison with values that were stored."""
    return from_json(to_json(value))


def conclude(found: Any, wanted: Any, before: Any) -> Literal["applied", "not_applied", "conflict"]:
    """Judge a write by the state that a read-back after the quiet period has `found`. `before`: the state before the
    write."""
    if agrees(found, wanted):
        return "applied"
    return "not_applied" if found == before else "conflict"


def first_look(write: ReadableWrite, item: Item, found: Any, wanted: Any) -> Literal["applied", "send", "conflict"]:
    """Judge a write that was not sent yet by the state `found` at the vendor: `applied` if it is as wanted already,
    `conflict` if it is neither that nor the state that the write expects."""
    if agrees(found, wanted):
        return "applied"
    return "send" if write.expected is None or agrees(found, as_stored_json(write.expected(item))) else "conflict"


def agrees(found: Any, wanted: Any) -> bool:
    """Return True if the state that was found equals the wanted one; of two objects, only the wanted fields are
    compared."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        return all(name in found and found[name] == value for name, value in wanted.items())
    return bool(found == wanted)


def after_failure(error: VendorError, *, doubtful: bool) -> State:
    """Return the state of an effect after a send failed. `doubtful`: an earlier send of the same write is unresolved,
    which a refusal of this one does not change."""
    if doubtful or error.ambiguous:
        return "unknown"
    return "rejected" if isinstance(error, PermanentError) else "planned"


async def record(
    connection: Connection, intents: list[Intent], fences: dict[int, int], replica: str
) -> dict[ClaimKey, EffectState]:
    """Record the intents, in the committer's transaction; return the states of their effects, by claim key. `fences`:
    the fences of their claims, by claim id. Intents missing from the result lost their claim (fenced)."""
    parameters = {
        "rows": as_json([intent.row() for intent in intents]),
        "claims": list(fences),
        "fences": list(fences.values()),
        "replica": replica,
        "send_within": timedelta(seconds=SEND_WITHIN),
    }
    asked_at = asyncio.get_running_loop().time()
    rows = await fetch_rows(connection, INTEND, parameters, prepare=True)
    return {(item, claim): EffectState._make([*columns, asked_at]) for item, claim, *columns in rows}


async def store_effects(
    connection: Connection, ended: list[EffectEnd], replica: str, accepted: Collection[int] = ()
) -> None:
    """Store the states of effects after executions, in the caller's transaction. `accepted`: the ids of the items whose
    results were stored in the same transaction; if the replica was declared dead, only their effects are stored."""
    rows = [one._replace(error=storable(one.error))._asdict() if one.error else one._asdict() for one in ended]
    parameters = {"rows": as_json(rows), "replica": replica, "accepted": list(accepted)}
    await connection.execute(SETTLE, parameters, prepare=True)


def again_or_never(write: Write, verdict: Retry | GiveUp, now: datetime) -> Retry | GiveUp:
    """Adapt the verdict on a failed execution to a write in doubt: a retry comes after the quiet period at the
    earliest; instead of being given up, a write that can be read back is retried then, and any other write is given up
    for good."""
    if isinstance(verdict, Retry):
        return Retry(max(verdict.at, now + write.quiet))
    return Retry(now + write.quiet) if isinstance(write, ReadableWrite) else GiveUp(permanent=True)
