"""The server: one ASGI app whose lifespan opens the database, migrates it and starts the engine on the server's loop.

The embedded PostgreSQL is watched: if its postmaster dies, it is started again.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext

import structlog
from fastapi import FastAPI

from ecluse import api
from ecluse.access import envelope
from ecluse.api import health
from ecluse.api.metrics import CountRequests, Metrics
from ecluse.base.errors import SetUpError
from ecluse.bootstrap import Database, bootstrap, notify_setup, open_secrets
from ecluse.engine import ROLES, Flow, Kit, Role
from ecluse.settings import Settings
from ecluse.vendors.guarded import GuardedHttp

log = structlog.get_logger(__name__)

WATCH_SECONDS = 1.0


def create_app(
    settings: Settings, database: Database, flows: Sequence[Flow], roles: frozenset[Role] = ROLES
) -> FastAPI:
    """`database` is open and migrated; the app gives it back when it stops."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.kit = kit = bootstrap(settings, database.dsn, flows, roles, app.state.secrets)
        await kit.start()
        app.state.metrics.kit = kit
        watch = asyncio.create_task(_watch(database))
        broken = asyncio.create_task(_leave_when_broken(kit))
        log.info("serving", replica=kit.replica, roles=sorted(roles), flows=[flow.name for flow in flows])
        async with api.serving(app, kit) if "api" in roles else nullcontext():
            yield
        broken.cancel()
        await kit.stop()
        watch.cancel()
        log.info("stopped", replica=kit.replica)

    app = FastAPI(title="Ecluse", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.secrets = open_secrets(settings, database)
    app.state.notify = notify_setup(settings, database.dsn, app.state.secrets)
    app.state.guard = GuardedHttp(app.state.notify.allowed_networks)
    envelope.install(app)
    if "api" in roles:
        api.mount(app)

    app.state.metrics, app.state.readiness = Metrics(), health.Readiness()
    app.add_middleware(CountRequests, metrics=app.state.metrics)
    app.include_router(health.routes)
    return app


async def _leave_when_broken(kit: Kit) -> None:
    await kit.broken.wait()
    signal.raise_signal(signal.SIGTERM)  # a supervisor starts us again; meanwhile others take over


async def _watch(database: Database) -> None:
    while database.server is not None:
        await asyncio.sleep(WATCH_SECONDS)
        if not await asyncio.to_thread(database.server.is_running):
            log.error("the embedded PostgreSQL has died, starting it again")
            try:
                await asyncio.to_thread(database.server.ensure_running)
            except SetUpError as error:
                log.critical("the embedded PostgreSQL does not start", error=error.message)
