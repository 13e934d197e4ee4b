"""Group commit: the results that have gathered are stored in one transaction, together with their effects. Intents of
writes at vendors are committed with them; a write is sent only after its intent is known to be committed.

An item is done exactly when its effect is stored. Items missing from the result of the compare-and-set were fenced out
(their claim was taken over, or their run has ended), and their results are dropped. A batch that fails on data is split
until the invalid item is alone; that item fails STORE_FAILED, the rest is committed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import psycopg
import structlog

from ecluse.base.crash import crashpoint
from ecluse.base.errors import PermanentError
from ecluse.db.connect import Connection, Pool, together
from ecluse.db.outage import is_unavailable, until_back
from ecluse.db.query import fetch_rows
from ecluse.engine.effects import protocol, reservations
from ecluse.engine.effects.protocol import EffectState, Intent
from ecluse.engine.lanes.registry import Lanes
from ecluse.engine.model import counters
from ecluse.engine.model.item import ClaimKey
from ecluse.engine.runs import run_log
from ecluse.engine.runs.lifecycle import LOCK_RUNS
from ecluse.engine.work import hooks
from ecluse.engine.work.hooks import Accepted
from ecluse.engine.work.verdict import ItemResult
from ecluse.engine.work.worker_slots import WorkerSlots

log = structlog.get_logger(__name__)

LARGEST_BATCH = 2_000
GATHER_SECONDS = 0.005

LOCK_CLAIMS = "SELECT 1 FROM claims WHERE id = ANY(%s) ORDER BY id FOR NO KEY UPDATE"

STORE = f"""
WITH inp AS MATERIALIZED (
    SELECT * FROM jsonb_to_recordset(%(rows)s::jsonb) AS t(id bigint, claim_id bigint, status text, permanent boolean,
        result jsonb, error_code text, error text, http_status smallint, event_id text, ambiguous boolean,
        maybe_paid boolean, outage boolean, due_at timestamptz, order_at timestamptz, postponed_cause text,
        postponed_why text)),
-- empty if this replica was declared dead: then nothing below happens
clock AS MATERIALIZED (SELECT ecluse_now() AS now FROM replicas WHERE id = %(replica)s AND state = 'live'),
fenced AS MATERIALIZED (
    SELECT c.id FROM claims c JOIN unnest(%(claims)s::bigint[], %(fences)s::int[]) AS f(id, fence)
      ON c.id = f.id AND c.fence = f.fence
    ORDER BY c.id FOR NO KEY UPDATE OF c),
-- an item that its gate has given up on (permanent) is not opened again
stored AS (
    UPDATE items i SET status = CASE WHEN inp.status = 'open' AND i.permanent THEN 'failed' ELSE inp.status END,
        result = inp.result,
        error_code = coalesce(inp.error_code, CASE WHEN inp.status = 'open' THEN i.error_code END),
        error = coalesce(inp.error, CASE WHEN inp.status = 'open' THEN i.error END),
        permanent = inp.status <> 'succeeded' AND (i.permanent OR coalesce(inp.permanent, false)),
        executions = i.executions + (inp.status <> 'open' OR inp.error_code IS NOT NULL AND inp.outage IS NULL)::int,
        due_at = coalesce(inp.due_at, i.due_at), order_at = coalesce(inp.order_at, i.order_at),
        postponed_cause = inp.postponed_cause, postponed_why = inp.postponed_why,
        claim_id = CASE WHEN inp.status = 'open' AND NOT i.permanent THEN NULL ELSE i.claim_id END,
        finished_at = CASE WHEN inp.status = 'open' AND NOT i.permanent THEN NULL ELSE clock.now END
    FROM clock, inp JOIN fenced ON fenced.id = inp.claim_id
    WHERE i.id = inp.id AND i.claim_id = inp.claim_id AND i.status = 'open'
    RETURNING i.id, i.run_id, i.stage, coalesce(nullif(i.target, ''), i.key) AS target, i.round, i.executions,
              inp.claim_id, i.status, inp.error_code, inp.error, inp.http_status, inp.event_id, inp.ambiguous,
              inp.maybe_paid, inp.outage, inp.due_at, i.error AS message, i.error_code AS code,
              inp.status = 'open' AND i.status = 'failed' AS given_up),
counted AS (
    UPDATE claims c SET succeeded = c.succeeded + n.succeeded, failed = c.failed + n.failed,
        ignored = c.ignored + n.ignored, released = c.released + n.released,
        done_at = CASE WHEN n.succeeded + n.ignored > 0 THEN clock.now ELSE c.done_at END
    FROM clock, (SELECT claim_id, count(*) FILTER (WHERE status = 'succeeded') AS succeeded,
                 count(*) FILTER (WHERE status = 'failed') AS failed,
                 count(*) FILTER (WHERE status = 'ignored') AS ignored,
                 count(*) FILTER (WHERE status = 'open') AS released FROM stored GROUP BY 1) n
    WHERE c.id = n.claim_id),
tried AS (
    INSERT INTO attempts (run_id, item_id, event_id, round, execution, at, replica_id, error_code, error, http_status,
                          ambiguous, maybe_paid, outage, retry_at)
    SELECT run_id, id, event_id, round, executions, now, %(replica)s, error_code, error, http_status, ambiguous,
           maybe_paid, outage, due_at
    FROM stored, clock WHERE status IN ('open', 'failed') AND error_code IS NOT NULL),
logged AS (
    INSERT INTO run_log AS l (run_id, at, last_at, level, message, event_id, data, count, targets, fold)
    SELECT run_id, now, now, 'error', message, min(event_id), jsonb_build_object('code', code, 'executions',
           max(executions)), count(*), (array_agg(DISTINCT target))[1:5], {run_log.FOLD} AS fold
    FROM stored, clock WHERE status = 'failed' GROUP BY run_id, now, stage, code, message
    -- in one order: two committers that add to the same lines must not deadlock
    ORDER BY run_id, fold {run_log.ADD_UP})
SELECT id, claim_id, executions, CASE WHEN given_up THEN code END, CASE WHEN given_up THEN message END FROM stored
"""  # noqa: S608 - our own names


class Committer:
    """Gathers results and intents of this replica's items and stores them in batches. `lanes` None: results of calls
    are not recorded with their lanes."""

    def __init__(self, pool: Pool, replica: str, lanes: Lanes | None = None) -> None:
        self._pool = pool
        self._replica = replica
        self._lanes = lanes
        self._gathered: list[ItemResult | Intent] = []
        self._committing: list[ItemResult | Intent] = []
        self._over: list[ItemResult] = []  # items finished in this commit whose stage emits live events
        self._something = asyncio.Event()

    def put(self, one: ItemResult | Intent) -> None:
        """Add a result or an intent to the next batch."""
        self._gathered.append(one)
        self._something.set()

    async def intend(self, intent: Intent) -> EffectState:
        """Commit the intent with the next batch, and return the state of its effect. Raise Fenced if its claim was
        lost, a VendorError if it cannot be stored."""
        self.put(intent)
        return await intent.answer

    @property
    def backlog(self) -> int:
        """The number of results and intents that wait for the next batch."""
        return len(self._gathered)

    @property
    def uncommitted(self) -> list[ItemResult]:
        """The results that are not known to be stored. Intents are left out: after a stop, no call waits for them."""
        return [one for one in self._committing + self._gathered if isinstance(one, ItemResult)]

    async def next_batch(self, slots: WorkerSlots) -> Sequence[ItemResult | Intent]:
        """Wait for results and intents, and GATHER_SECONDS longer for more of them if there are few and worker slots
        are busy; return at most LARGEST_BATCH of them."""
        await self._something.wait()
        if len(self._gathered) < LARGEST_BATCH // 10 and slots.busy:
            await asyncio.sleep(GATHER_SECONDS)
        self._committing, self._gathered = self._gathered[:LARGEST_BATCH], self._gathered[LARGEST_BATCH:]
        if not self._gathered:
            self._something.clear()
        return self._committing

    async def commit(self, batch: Sequence[ItemResult | Intent]) -> list[ItemResult]:
        """Store the batch, retrying while the database is unavailable. Return its finished items whose stage emits live
        events."""
        crashpoint("before commit")
        # A commit whose answer was lost may have succeeded: the compare-and-set makes the retry idempotent.
        await until_back("commit", partial(self._write, batch))
        crashpoint("after commit")
        self._committing = []
        over, self._over = self._over, []
        return over

    async def _write(self, batch: Sequence[ItemResult | Intent]) -> None:
        if self._lanes is not None:
            await self._lanes.write_results(self._pool)
        await self._store(batch)

    async def _store(self, batch: Sequence[ItemResult | Intent]) -> None:
        try:
            await self._store_together(batch)
        except Exception as error:  # a flow's `save` may raise anything: data refused, or a bug
            too_long = isinstance(error, psycopg.errors.TransactionTimeout) and len(batch) > 1
            if is_unavailable(error) and not too_long:
                raise
            if len(batch) > 1:
                middle = len(batch) // 2
                await self._store(batch[:middle])
                await self._store(batch[middle:])
            elif isinstance(one := batch[0], Intent):
                one.refuse(PermanentError(f"The write could not be recorded: {_why(error)}", code="STORE_FAILED"))
            elif one.error_code == "STORE_FAILED" and one.stage.on_end is not None:
                # The flow refuses the failure, too: it is stored all the same, and `Flow.ended` is left to the flow.
                await self._store([one._replace(stage=replace(one.stage, on_end=None))])
            elif one.error_code == "STORE_FAILED":
                raise
            else:
                log.error("commit: result refused", **one.item.log_fields, error=str(error).strip())
                await self._store([one.unstorable(_why(error))])

    async def _store_together(self, batch: Sequence[ItemResult | Intent]) -> None:
        """Store the batch in one transaction, which has several statements only if intents, effects, paid calls or
        hooks of stages need them; then answer the intents, and count the finished items."""
        results = [one for one in batch if isinstance(one, ItemResult)]
        intents = [one for one in batch if isinstance(one, Intent)] if len(results) < len(batch) else []
        ended = [one.effect for one in results if one.effect is not None]
        paid = {one.claim_key: one.settlement for one in results if one.settlement is not None}
        fences = {result.claim_id: result.fence for result in results}
        fences |= {intent.claimed.claim_id: intent.claimed.fence for intent in intents}
        parameters = {
            "rows": (b"[" + b",".join([result.row() for result in results]) + b"]").decode(),
            "claims": list(fences),
            "fences": list(fences.values()),
            "replica": self._replica,
        }
        accepted: dict[ClaimKey, Accepted] = {}
        recorded: dict[ClaimKey, EffectState] = {}
        async with self._pool.connection() as connection:
            if intents or ended or paid or any(one.is_heard for one in results):
                async with together(connection):
                    if opening := {one.item.run_id for one in results if one.stage.opens and one.is_heard}:
                        await connection.execute(LOCK_RUNS, (list(opening),))
                    if intents:
                        # Lock the claims before reading them: ending the run or taking over either waits for this
                        # commit or is visible to it.
                        await connection.execute(LOCK_CLAIMS, (list(fences),), prepare=True)
                    if results:
                        accepted = await _execute(connection, parameters)
                    if intents:
                        recorded = await protocol.record(connection, intents, fences, self._replica)
                    if ended:
                        await protocol.store_effects(connection, ended, self._replica, [item for item, _ in accepted])
                    await hooks.call(connection, results, accepted)
                    if paid:  # last: no lock is awaited while the totals are locked
                        await reservations.settle_costs(connection, paid)
                    crashpoint("in commit")
                if intents:
                    crashpoint("after intent")
            else:
                accepted = await _execute(connection, parameters)
        for intent in intents:
            intent.reply(recorded.get(intent.claimed.claim_key))
        all_in = len(accepted) == len(results)
        finished = [one for one in results if one.status != "open" and (all_in or one.claim_key in accepted)]
        self._over += [one for one in finished if one.stage.news]
        counters.items_finished.update([(one.item.flow, one.item.stage, one.status) for one in finished])
        if not all_in:
            log.warning(
                "commit: results dropped, their claims were lost (fenced out)",
                items=len(results) - len(accepted),
                replica=self._replica,
            )


async def _execute(connection: Connection, parameters: dict[str, Any]) -> dict[ClaimKey, Accepted]:
    """Store the results of items; return the accepted ones, by claim key. The other items lost their claim (fenced)."""
    rows = await fetch_rows(connection, STORE, parameters, prepare=True)
    return {(item, claim): Accepted(executions, code, error) for item, claim, executions, code, error in rows}


def _why(error: Exception) -> str:
    if isinstance(error, psycopg.Error) and error.diag.message_primary:
        detail = f" ({error.diag.message_detail})" if error.diag.message_detail else ""
        return f"{error.diag.message_primary}{detail}"
    return f"{type(error).__name__}: {error}"
