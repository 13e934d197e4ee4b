"""Executions of rule runs, as rows of the engine: what its workers would have left."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from ecluse.db.connect import Connection
from ecluse.db.query import fetch_value

LANE = """
INSERT INTO lanes (name, tenant_id, per_second, declared_per_second, burst, next_free_at)
VALUES (%s, 'default', 2, 2, 40, ecluse_now()) RETURNING id
"""
RUN = """
INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, created_at)
VALUES ('default', 'pricing', gen_random_uuid(), false, 'running', 'running', ecluse_now()) RETURNING id
"""
LINK = "INSERT INTO rule_executions (run_id, rule_run_id, kind, number) VALUES (%s, %s, %s, %s)"
ITEM = """
INSERT INTO items (tenant_id, run_id, flow, stage, key, target, lane_id, group_key, due_at, executions)
VALUES ('default', %s, 'pricing', 'apply', gen_random_uuid(), 'x', %s, %s, ecluse_now(), %s) RETURNING id
"""
# The attempts of one call are stored in one commit, hence at one instant.
REFUSED = """
WITH clock AS MATERIALIZED (SELECT ecluse_now() AS now)
INSERT INTO attempts (run_id, item_id, event_id, round, execution, at, replica_id, error_code, error, ambiguous)
SELECT run_id, id, 'e', 0, 1, now - %s, 'r', 'THROTTLED', 'slow down', false
FROM items, clock WHERE id = ANY(%s)
"""
END = """
UPDATE runs SET status = 'completed', state = 'succeeded', ended_at = created_at + %s, selected = 0, successful = 0,
    failed = 0, ignored = 0, end_cause = 'normal'
WHERE id = %s
"""


def lane_name(tenant: str, project: int) -> str:
    return f"shop/{tenant}/project-{project}"


async def new_lane(connection: Connection, project: int) -> int:
    return int(await fetch_value(connection, LANE, (lane_name("default", project),)))


async def new_execution(
    connection: Connection, rule_run: int, lane: int, executions: Sequence[int] = (), *, kind: str = "apply", number=0
) -> tuple[int, list[int]]:
    """An execution whose items, all of one product, were executed so often; its id and theirs."""
    run = int(await fetch_value(connection, RUN))
    await connection.execute(LINK, (run, rule_run, kind, number))
    return run, [int(await fetch_value(connection, ITEM, (run, lane, "p0", one))) for one in executions]


async def refuse(connection: Connection, items: Sequence[int], ago: timedelta = timedelta()) -> None:
    """A 429 to one call for these items."""
    await connection.execute(REFUSED, (ago, list(items)))


async def end(connection: Connection, run: int, after: timedelta) -> None:
    await connection.execute(END, (after, run))
