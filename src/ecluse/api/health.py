"""What supervisors and monitoring ask, without a key: alive, ready, metrics."""

from __future__ import annotations

import prometheus_client
import psycopg
from fastapi import APIRouter, Request, Response

routes = APIRouter(include_in_schema=False)


@routes.get("/healthz")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@routes.get("/readyz")
async def readyz(request: Request, response: Response) -> dict[str, str]:
    kit = request.app.state.kit
    try:
        async with kit.pool.connection(timeout=2) as connection:
            await connection.execute("SELECT 1")
    except (psycopg.OperationalError, psycopg.errors.QueryCanceled) as error:
        response.status_code = 503
        return {"status": "database away", "error": str(error).strip()}
    return {"status": "ready", "replica": kit.replica}


@routes.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(await request.app.state.metrics.text(), media_type=prometheus_client.CONTENT_TYPE_LATEST)
