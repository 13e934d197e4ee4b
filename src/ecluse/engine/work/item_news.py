"""What is told of items that are over, for whoever looks on: after the commit, best effort, never in anybody's way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from ecluse.db.connect import Pool
from ecluse.engine.model.flow import EmitLive, FinishedItem, Stage
from ecluse.engine.work.committer import ItemResult

log = structlog.get_logger(__name__)

SECONDS = 2.0


async def tell(pool: Pool, finished: Sequence[ItemResult], told: EmitLive) -> None:
    if not finished:
        return
    by_stage: dict[int, tuple[Stage, list[FinishedItem]]] = {}
    for one in finished:
        over = FinishedItem(one.item, one.status, one.result, one.error_code, one.error)  # type: ignore[arg-type]
        by_stage.setdefault(id(one.stage), (one.stage, []))[1].append(over)
    try:
        async with asyncio.timeout(SECONDS), pool.connection() as connection:
            for stage, over_there in by_stage.values():
                if stage.news is not None:
                    told(await stage.news(connection, over_there))
    except Exception as error:  # noqa: BLE001 - whatever goes wrong, nobody has lost more than a glimpse
        log.warning("news of items lost", items=len(finished), error=f"{type(error).__name__}: {error}")
