"""Replicas that sleep in the middle of a transaction: what they have locked is free again after a while."""

from __future__ import annotations

import sqlalchemy
from dbos._dbos import _get_dbos_instance

from ecluse.engine.kit import Kit
from tests.support.engine_flows import flow, stage

SHOW = "SHOW idle_in_transaction_session_timeout"


async def test_no_connection_sleeps_in_a_transaction_for_long(start_kit):
    """Those of the orchestration, too: one of these kept a dead replica's runs and items from being taken over."""
    kit: Kit = await start_kit(flow(stage()))
    async with kit.pool.connection() as connection:
        assert await (await connection.execute(SHOW)).fetchone() == ("10s",)
    with _get_dbos_instance()._sys_db.engine.connect() as theirs:
        assert theirs.execute(sqlalchemy.text(SHOW)).scalar() == "10s"
