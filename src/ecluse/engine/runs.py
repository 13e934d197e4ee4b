"""The life of a run row: started once per event key, selected, settled, ended. `_set_status` is the only writer of a
run's status, by compare-and-set on the word it had."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import psycopg
import structlog
from psycopg.rows import class_row, dict_row
from psycopg.types.json import Jsonb
from pydantic import ValidationError
from pydantic_core import to_json

from ecluse.base.crash import crashpoint
from ecluse.base.errors import InvalidInput, NotFound
from ecluse.base.ids import retry_id
from ecluse.base.text import LONGEST_KEY, storable
from ecluse.db.connect import Connection
from ecluse.engine import run_log
from ecluse.engine.flow import Flow, NewItem, Run
from ecluse.engine.states import State, terminal_state

log = structlog.get_logger(__name__)

RUNS_CHANNEL = "ecluse_runs"
ENDED_CHANNEL = "ecluse_ended"
# No slash: a workflow id is tenant/event key, and must say which is which.
TENANT = re.compile(r"[A-Za-z0-9._-]{1,100}")
EndCause = Literal["normal", "operator", "stale", "catastrophic"]


@dataclass(frozen=True)
class Started:
    run: Run
    deduplicated: bool  # the key was known: this is the run it started then, and nothing new was started


@dataclass(frozen=True)
class Start:
    """What it takes to start a run. The event key names the decision to run, so that taking it twice is harmless."""

    flow: Flow
    event_key: str
    tenant_id: str = "default"
    input: dict[str, Any] | None = None
    parent_run_id: int | None = None
    correlation_id: str | None = None
    # A run that ended does not block its key: a deliberate repetition is a new run, under the key's next name.
    again: bool = False


INSERT = """
INSERT INTO runs (tenant_id, flow, event_key, parent_run_id, orchestrated, status, state, input, correlation_id,
                  created_at)
VALUES (%(tenant)s, %(flow)s, %(key)s, %(parent)s, %(orchestrated)s, %(status)s, %(state)s, %(input)s,
        %(correlation)s, ecluse_now())
ON CONFLICT ON CONSTRAINT runs_event_key DO NOTHING
RETURNING id, tenant_id, flow, event_key, input
"""


async def insert(connection: Connection, start: Start) -> Started:
    flow = start.flow
    try:
        given = flow.input.model_validate(start.input or {})
    except ValidationError as error:
        raise InvalidInput(f"input of flow {flow.name}: {_readable(error)}") from error
    if not 1 <= len(start.event_key) <= 500 or "\x00" in start.event_key:
        raise InvalidInput("the event key of a run is 1 to 500 characters without NUL")
    if not TENANT.fullmatch(start.tenant_id):
        raise InvalidInput(f"a tenant is 1 to 100 letters, digits, '.', '_' or '-', not {start.tenant_id!r}")
    row = {
        "tenant": start.tenant_id,
        "flow": flow.name,
        "parent": start.parent_run_id,
        "orchestrated": flow.story is not None,
        "status": flow.words.initial,
        "state": flow.words.meaning[flow.words.initial],
        "input": Jsonb(given.model_dump(mode="json")),
        "correlation": start.correlation_id,
    }
    for times in itertools.count():
        started, ended = await _insert(connection, {**row, "key": retry_id(start.event_key, times)})
        if not (ended and start.again):
            break
    return started


async def _insert(connection: Connection, row: dict[str, Any]) -> tuple[Started, bool]:
    """The run of this key, new or known; and whether it has ended."""
    async with connection.cursor(row_factory=class_row(Run)) as cursor:
        try:
            await cursor.execute(INSERT, row)
        except psycopg.DataError as error:
            raise InvalidInput(f"input of flow {row['flow']}: {error.diag.message_primary}") from error
        if (run := await cursor.fetchone()) is not None:
            return Started(run, deduplicated=False), False
    # Committed by somebody else, hence visible to this second statement.
    known = await connection.execute(
        "SELECT ended_at IS NOT NULL, id, tenant_id, flow, event_key, input FROM runs"
        " WHERE tenant_id = %(tenant)s AND event_key = %(key)s",
        row,
    )
    found = await known.fetchone()
    assert found is not None  # noqa: S101 - runs are never deleted while their key is in use
    return Started(Run(*found[1:]), deduplicated=True), bool(found[0])


async def announce(connection: Connection) -> None:
    """Somebody else leads: a server that hears this takes up the runs whose workflow has not been started."""
    await connection.execute("SELECT pg_notify(%s, '')", (RUNS_CHANNEL,))


async def load(connection: Connection, run_id: int) -> Run:
    async with connection.cursor(row_factory=class_row(Run)) as cursor:
        await cursor.execute("SELECT id, tenant_id, flow, event_key, input FROM runs WHERE id = %s", (run_id,))
        run = await cursor.fetchone()
    if run is None:
        raise NotFound(f"there is no run {run_id}")
    return run


async def has_ended(connection: Connection, run_id: int) -> bool:
    row = await (await connection.execute("SELECT ended_at IS NOT NULL FROM runs WHERE id = %s", (run_id,))).fetchone()
    if row is None:
        raise NotFound(f"there is no run {run_id}")
    return bool(row[0])


# Nobody leads them, or they have had twice their time. `only_overdue`: a live replica leads it.
STALE = """
SELECT r.id, date_trunc('second', ecluse_now() - r.started_at), f.most,
       led AND r.started_at >= ecluse_now() - 2 * f.most AS only_overdue
FROM runs r JOIN unnest(%(flows)s::text[], %(limits)s::interval[]) AS f(flow, most) ON f.flow = r.flow,
LATERAL (SELECT EXISTS (
    SELECT 1 FROM dbos.workflow_status w JOIN replicas p ON p.id = w.executor_id AND p.state = 'live'
    WHERE w.workflow_uuid = r.tenant_id || '/' || r.event_key AND w.status = 'PENDING') AS led) l
WHERE r.ended_at IS NULL AND r.orchestrated AND r.started_at < ecluse_now() - f.most
"""

# With what became of its targets: how many by reason, successes under their own name.
SHOW = """
SELECT r.*, (SELECT coalesce(jsonb_object_agg(code, n), '{}') FROM (
    SELECT coalesce(error_code, outcome, 'open') AS code, count(*) AS n FROM outcomes WHERE run_id = r.id GROUP BY 1) o
) AS outcomes FROM runs r WHERE r.id = %s
"""


async def show(connection: Connection, run_id: int) -> dict[str, Any]:
    async with connection.cursor(row_factory=dict_row) as cursor:
        await cursor.execute(SHOW, (run_id,))
        row = await cursor.fetchone()
    if row is None:
        raise NotFound(f"there is no run {run_id}")
    return row


async def begin(connection: Connection, flow: Flow, run: Run) -> bool:
    """Queued to running. False if it was running already (a replay); an ended run refuses."""
    async with connection.transaction():
        word = await _lock(connection, run.id)
        if flow.words.meaning[word] is State.RUNNING:
            return False
        await _set_status(connection, flow, run, word, State.RUNNING)
    return True


async def set_phase(connection: Connection, run: Run, phase: str) -> None:
    await connection.execute(
        "UPDATE runs SET phase = %s WHERE id = %s AND ended_at IS NULL AND phase IS DISTINCT FROM %s",
        (phase, run.id, phase),
    )


async def select(connection: Connection, run: Run, targets: Sequence[NewItem]) -> int:
    """The targets this run answers for, each with an open outcome. Decided once: a replay keeps the first answer."""
    names = sorted({storable(item.target or item.key, LONGEST_KEY) for item in targets})
    async with connection.transaction():
        cursor = await connection.execute(
            "UPDATE runs SET selected = %s WHERE id = %s AND selected IS NULL AND ended_at IS NULL",
            (len(names), run.id),
        )
        if cursor.rowcount:
            await connection.execute(
                "INSERT INTO outcomes (run_id, target) SELECT %s, jsonb_array_elements_text(%s::jsonb)",
                (run.id, to_json(names).decode()),
            )
            await run_log.write(connection, run.id, f"selected {len(names)} targets", targets=len(names))
        row = await (await connection.execute("SELECT selected FROM runs WHERE id = %s", (run.id,))).fetchone()
    return row[0] if row else 0


async def open_targets(connection: Connection, run: Run) -> Sequence[NewItem]:
    """Every target without an outcome of which nothing has failed or is unfinished: what the next stage works on."""
    cursor = await connection.execute(
        "SELECT target FROM outcomes o WHERE run_id = %s AND outcome IS NULL AND NOT EXISTS (SELECT 1 FROM items i"
        " WHERE i.run_id = o.run_id AND i.target = o.target AND i.status <> 'succeeded') ORDER BY target",
        (run.id,),
    )
    return [NewItem(key=str(row[0])) for row in await cursor.fetchall()]


# In three strokes, the common one cheap: all items succeeded; something did not (failed before ignored, the first one
# names the reason, an item nobody finished is incomplete); nothing was done at all.
SETTLE = (
    """
UPDATE outcomes o SET outcome = 'successful'
FROM (SELECT target FROM items WHERE run_id = %(run)s GROUP BY target HAVING bool_and(status = 'succeeded')) w
WHERE o.run_id = %(run)s AND o.target = w.target AND o.outcome IS NULL
""",
    """
UPDATE outcomes o SET outcome = CASE w.status WHEN 'ignored' THEN 'ignored' ELSE 'failed' END,
    error_code = CASE w.status WHEN 'open' THEN 'INCOMPLETE' ELSE w.error_code END,
    reason = CASE w.status WHEN 'open' THEN 'Not finished when the run ended' ELSE w.error END
FROM (SELECT DISTINCT ON (target) target, status, error_code, error FROM items
      WHERE run_id = %(run)s AND status <> 'succeeded'
      ORDER BY target, array_position(ARRAY['failed', 'open', 'ignored'], status), finished_at, id) w
WHERE o.run_id = %(run)s AND o.target = w.target AND o.outcome IS NULL
""",
    """
UPDATE outcomes SET outcome = 'failed', error_code = 'NOT_PROCESSED', reason = 'No work was done for this target'
WHERE run_id = %(run)s AND outcome IS NULL
""",
)

SETTLE_BY_FORCE = (
    "UPDATE outcomes SET outcome = 'failed', error_code = %s, reason = %s WHERE run_id = %s AND outcome IS NULL"
)

# A failure that may yet turn out to be a success at the vendor says so; `effects` will know.
MAY_EXIST = """
UPDATE outcomes o SET effect_may_exist = true FROM effects e
WHERE o.run_id = %(run)s AND e.run_id = o.run_id AND e.target = o.target AND e.state IN ('sending', 'unknown')
  AND o.outcome = 'failed'
"""

# Nothing of an ended run is started or stored any more: waiting items go under a closed claim, fences move on.
CLOSE_WORK = """
WITH late AS (
    SELECT id, stage, lane_id FROM items WHERE run_id = %(run)s AND status = 'open'
    ORDER BY id FOR UPDATE),
fenced AS (
    UPDATE claims SET fence = fence + 1, released = released + in_flight WHERE run_id = %(run)s AND in_flight > 0),
claim AS (
    INSERT INTO claims (replica_id, run_id, stage, lane_id, taken, failed, taken_at)
    SELECT 'end of run', %(run)s, stage, lane_id, count(*), count(*), ecluse_now() FROM late GROUP BY stage, lane_id
    RETURNING id, stage, lane_id),
closed AS (
    UPDATE items i SET claim_id = c.id, status = 'failed', permanent = true, error_code = 'RUN_ENDED',
        error = coalesce(i.error, 'The run ended first'), finished_at = ecluse_now()
    FROM late JOIN claim c ON c.stage = late.stage AND c.lane_id = late.lane_id WHERE i.id = late.id)
UPDATE stages SET ended_at = ecluse_now(), end_cause = 'run ended' WHERE run_id = %(run)s AND ended_at IS NULL
"""


async def end(
    connection: Connection,
    flow: Flow,
    run: Run,
    *,
    cause: EndCause = "normal",
    code: str | None = None,
    reason: str | None = None,
) -> bool:
    """Settle and end. False if it had ended already: whoever comes second changes nothing."""
    async with connection.transaction():
        word = await _lock(connection, run.id)
        if flow.words.meaning[word] not in (State.QUEUED, State.RUNNING):
            return False
        await connection.execute("UPDATE runs SET selected = coalesce(selected, 0) WHERE id = %s", (run.id,))
        # Claims before items before outcomes: the one lock order.
        await connection.execute("SELECT 1 FROM claims WHERE run_id = %s ORDER BY id FOR NO KEY UPDATE", (run.id,))
        if cause == "normal":
            # Freshly filled tables have no statistics: a planner that believes in one row would loop over thousands.
            await connection.execute("SET LOCAL enable_nestloop = off")
            for stroke in SETTLE:
                await connection.execute(stroke, {"run": run.id})
            await connection.execute("SET LOCAL enable_nestloop = on")
        else:
            text = storable(f"Run ended: {cause}: {reason or code or 'no reason given'}")
            await connection.execute(SETTLE_BY_FORCE, (code or "RUN_ENDED", text, run.id))
        await connection.execute(MAY_EXIST, {"run": run.id})
        await connection.execute(CLOSE_WORK, {"run": run.id})
        crashpoint("in finalize")
        counts = await _finish(connection, flow, run, word, cause, code, reason)
    log.info("run ended", run_id=run.id, flow=flow.name, event_key=run.event_key, cause=cause, **counts)
    return True


async def _finish(
    connection: Connection, flow: Flow, run: Run, word: str, cause: EndCause, code: str | None, reason: str | None
) -> dict[str, Any]:
    row = await (
        await connection.execute(
            "SELECT count(*) FILTER (WHERE outcome = 'successful'), count(*) FILTER (WHERE outcome = 'failed'),"
            " count(*) FILTER (WHERE outcome = 'ignored') FROM outcomes WHERE run_id = %s",
            (run.id,),
        )
    ).fetchone()
    successful, failed, ignored = (n for n in row) if row else (0, 0, 0)
    state = terminal_state(successful, failed) if cause == "normal" else State.FAILED
    why = reason
    if cause == "normal" and successful + failed == 0:
        why = "all_ignored" if ignored else "no_targets"
    await _set_status(
        connection,
        flow,
        run,
        word,
        state,
        ended=True,
        successful=successful,
        failed=failed,
        ignored=ignored,
        end_cause=cause,
        reason=None if why is None else storable(why),
        error_code=code,
        error_message=None if cause == "normal" or reason is None else storable(reason),
    )
    return {"state": state.value, "successful": successful, "failed": failed, "ignored": ignored}


async def _lock(connection: Connection, run_id: int) -> str:
    row = await (
        await connection.execute("SELECT status FROM runs WHERE id = %s FOR NO KEY UPDATE", (run_id,))
    ).fetchone()
    if row is None:
        raise NotFound(f"there is no run {run_id}")
    return str(row[0])


async def _set_status(
    connection: Connection,
    flow: Flow,
    run: Run,
    from_word: str,
    state: State,
    *,
    ended: bool = False,
    **columns: Any,
) -> None:
    to_word = flow.words.word(state, after=from_word)
    flow.words.check(from_word, to_word)
    sets = "".join(f", {name} = %({name})s" for name in columns)
    instant = "ended_at" if ended else "started_at"
    await connection.execute(
        f"UPDATE runs SET status = %(to)s, state = %(state)s, {instant} = ecluse_now(){sets}"  # noqa: S608 - our names
        " WHERE id = %(run)s AND status = %(from)s",
        {"to": to_word, "state": state, "run": run.id, "from": from_word, **columns},
    )
    if ended:
        await connection.execute("SELECT pg_notify(%s, %s)", (ENDED_CHANNEL, str(run.id)))
    level: Literal["info", "error"] = "error" if state is State.FAILED else "info"
    await run_log.write(connection, run.id, f"{from_word} -> {to_word}", level=level, **columns)


def _readable(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(str(part) for part in e['loc']) or 'input'}: {e['msg']}" for e in error.errors())
