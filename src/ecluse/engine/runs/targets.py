"""The targets of a run: select them, and list those that the next stage works on. `outcomes.py` settles them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ecluse.base.text import LONGEST_KEY, storable
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_column, fetch_value
from ecluse.engine.model.flow import NewItem, Run
from ecluse.engine.outbox import events

SELECT = """
WITH t AS MATERIALIZED (
    SELECT DISTINCT run, target FROM unnest(%(run_of)s::bigint[], %(targets)s::text[]) AS t(run, target)),
chosen AS (
    UPDATE runs r SET selected = n.targets
    FROM (SELECT id, count(t.target) AS targets FROM unnest(%(runs)s::bigint[]) AS g(id)
          LEFT JOIN t ON t.run = g.id GROUP BY id) AS n
    WHERE r.id = n.id AND r.selected IS NULL AND r.ended_at IS NULL RETURNING r.id, r.selected),
noted AS (
    INSERT INTO run_log (run_id, at, level, message, data)
    SELECT id, ecluse_now(), 'info',
           'selected ' || selected || CASE selected WHEN 1 THEN ' target' ELSE ' targets' END,
           jsonb_build_object('targets', selected)
    FROM chosen),
opened AS (INSERT INTO outcomes (run_id, target) SELECT t.run, t.target FROM t JOIN chosen ON chosen.id = t.run
           ORDER BY t.run, t.target)
SELECT id FROM chosen
"""


async def select(connection: Connection, targets: Mapping[int, Sequence[NewItem]]) -> None:
    """Store the targets of runs, each with an open outcome, and write the event `selected`. `targets` has the items of
    each run, by run id; an item's target is its `target` or its key. Runs that have selected targets before (a replay)
    or have ended are left unchanged."""
    given = {
        "runs": list(targets),
        "run_of": [run_id for run_id, items in targets.items() for _ in items],
        "targets": [storable(item.target or item.key, LONGEST_KEY) for items in targets.values() for item in items],
    }
    async with connection.transaction():
        if chosen := await fetch_column(connection, SELECT, given):
            await events.write_run_events(connection, chosen, "selected")


async def how_many_selected(connection: Connection, run_id: int) -> int:
    """Return the number of targets of the run; 0 before they are selected."""
    return await fetch_value(connection, "SELECT selected FROM runs WHERE id = %s", (run_id,)) or 0


async def open_targets(connection: Connection, run: Run) -> Sequence[NewItem]:
    """Return one item per open target of the run: a target without an outcome whose items, if any, have all succeeded.
    By default, the next stage works on these."""
    found = await fetch_column(
        connection,
        "SELECT target FROM outcomes o WHERE run_id = %s AND outcome IS NULL AND NOT EXISTS (SELECT 1 FROM items i"
        " WHERE i.run_id = o.run_id AND i.target = o.target AND i.status <> 'succeeded') ORDER BY target",
        (run.id,),
    )
    return [NewItem(target) for target in found]
