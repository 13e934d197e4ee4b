"""Routes for supervisors and monitoring, which need no key: liveness, readiness, metrics."""

from __future__ import annotations

import asyncio
import time

import prometheus_client
import psycopg
import structlog
from fastapi import APIRouter, Request, Response

from ecluse.base.version import version
from ecluse.db.connect import Pool
from ecluse.db.outage import one_line
from ecluse.engine.kit import Kit

log = structlog.get_logger(__name__)
routes = APIRouter(include_in_schema=False)
KEEP_SECONDS = 1.0


class Readiness:
    """Readiness of the server: whether the database answers. A result is used for all requests within a second, because
    the route is public and may be requested often."""

    def __init__(self) -> None:
        self._asking = asyncio.Lock()
        self._good_until = 0.0
        self._ready = False

    async def of(self, pool: Pool) -> bool:
        async with self._asking:
            if time.monotonic() >= self._good_until:
                self._ready = await self._ask(pool)
                self._good_until = time.monotonic() + KEEP_SECONDS
        return self._ready

    async def _ask(self, pool: Pool) -> bool:
        try:
            async with pool.connection(timeout=2) as connection:
                await connection.execute("SELECT 1")
        except (psycopg.OperationalError, psycopg.errors.QueryCanceled) as error:
            log.warning("readiness: database unavailable", error=one_line(error))
            return False
        return True


@routes.get("/healthz")
async def healthz() -> dict[str, str]:
    return {"status": "ok", "version": version()}


@routes.get("/readyz")
async def readyz(request: Request, response: Response) -> dict[str, str]:
    kit: Kit = request.app.state.kit
    if not await request.app.state.readiness.of(request.app.state.watching):
        response.status_code = 503
        return {"status": "database away"}
    return {"status": "ready", "replica": kit.replica}


@routes.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(await request.app.state.metrics.text(), media_type=prometheus_client.CONTENT_TYPE_LATEST)
