"""The server: one ASGI app, whose lifespan starts the engine on the server's loop and stops it. The embedded PostgreSQL
is watched: if its postmaster dies, it is started again."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial

import structlog
import uvicorn
from fastapi import FastAPI
from fastapi.middleware.gzip import GZipMiddleware

from ecluse import api, web
from ecluse.access import envelope
from ecluse.access.edge import Connection, Edge
from ecluse.access.limits import Limiter
from ecluse.access.polls import Polls
from ecluse.access.sockets import Socket
from ecluse.api import health
from ecluse.api.metrics import Metrics
from ecluse.api.realtime import lost_rights
from ecluse.api.upkeep import Upkeep
from ecluse.base import trace
from ecluse.base.errors import SetUpError
from ecluse.base.version import version
from ecluse.bootstrap import (
    Database,
    allowed,
    automation_config,
    bootstrap,
    enrichment_config,
    job_leasing,
    keep_days,
    lacking,
    notify_setup,
    open_realtime,
    open_secrets,
    retention_rules,
    trace_files,
    trace_folders,
    transcription_config,
    vendor_setup,
)
from ecluse.bootstrap.checks import check_disk, check_settings, has_price, unpriced
from ecluse.bootstrap.edge import check_descriptors, edge_limits
from ecluse.db.connect import pool
from ecluse.db.pools import WATCHING
from ecluse.db.reads import READ_SETTINGS
from ecluse.doctor.findings import Finding
from ecluse.engine import ROLES, Flow, Role
from ecluse.engine.kit import Kit
from ecluse.flow import Package
from ecluse.flows.automation.diagnostic import Setup
from ecluse.realtime.hub import Hub
from ecluse.realtime.limits import LIMITS, Limits
from ecluse.settings import Settings
from ecluse.vendors.guarded import GuardedHttp

log = structlog.get_logger(__name__)

WATCH_SECONDS = 1.0
ACCEPTED_AT_ONCE = 16
LARGEST_FRAME = 65_536


def create_app(
    settings: Settings,
    database: Database,
    flows: Sequence[Flow],
    roles: frozenset[Role] = ROLES,
    *,
    packages: Sequence[Package] = (),
    limits: Limits = LIMITS,
) -> FastAPI:
    """Build the ASGI app. `database` is open and migrated; the caller releases it after the app has stopped.
    `packages`: packages that are not built in, whose flows are among `flows`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.kit = kit = bootstrap(
            settings,
            database.dsn,
            flows,
            roles,
            secrets=app.state.secrets,
            live=realtime.hub.emit,
            sinks=realtime.sinks,
            leasing=app.state.leasing,
        )
        files = trace_files(settings, kit.clock)
        trace.listeners.extend(files)
        await kit.start()
        app.state.metrics.kit, app.state.metrics.hub = kit, realtime.hub
        watch = asyncio.create_task(_watch(database))
        broken = asyncio.create_task(_leave_when_broken(kit))
        log.info("server: started", replica=kit.replica, roles=sorted(roles), flows=[flow.name for flow in flows])
        for one in lacking(settings):
            (log.warning if one.begun else log.info)(
                f"server: runs of {one.flow} will fail until these are set", unset=one.unset
            )
        answers = "api" in roles
        async with (
            pool(database.dsn, size=WATCHING, settings=READ_SETTINGS) as app.state.watching,
            api.serving(app, kit) if answers else nullcontext(),
            realtime.serving(database.dsn, kit.pool, kit.replica, answers=answers),
        ):
            app.state.metrics.pool = app.state.watching
            yield
        broken.cancel()
        await kit.stop()
        watch.cancel()
        trace.listeners[:] = [one for one in trace.listeners if one not in files]
        log.info("server: stopped", replica=kit.replica)

    app = FastAPI(
        title="Ecluse",
        version=version(),
        lifespan=lifespan,
        openapi_url=None,  # `api.mount` adds the route
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.secrets = open_secrets(settings, database)
    app.state.connections = vendor_setup(settings, app.state.secrets)
    app.state.limits = Limiter(allowed(settings))
    app.state.key_lifetime = timedelta(days=settings.ECLUSE_KEY_LIFETIME_DAYS) or None
    app.state.transcriptions = transcription_config(settings)
    app.state.enrichment = enrichment_config(settings)
    app.state.automation = _automation(settings, sealing=app.state.secrets is not None)
    app.state.realtime = realtime = open_realtime(
        settings, app.state.secrets, replace(limits, sockets=settings.ECLUSE_LIMIT_TENANT_SOCKETS), lost_rights
    )
    app.state.notify = notify_setup(settings, database.dsn, app.state.secrets)
    app.state.leasing = job_leasing(settings)
    app.state.guard = GuardedHttp(app.state.notify.allowed_networks)
    app.state.unpriced = unpriced(settings)
    app.state.upkeep = _upkeep(settings, database, flows, roles)
    app.state.edge = Edge(edge_limits(settings, roles))
    gauges = [gauge for package in packages for gauge in package.gauges]
    app.state.metrics, app.state.readiness = Metrics(app.state.edge, gauges), health.Readiness()
    app.state.packages = packages
    envelope.install(app, app.state.metrics.answered)
    if "api" in roles:
        api.mount(app, packages)
        web.mount(app, [package.pages for package in packages if package.pages is not None])
    app.add_middleware(GZipMiddleware, compresslevel=6)  # does not compress streams
    app.include_router(health.routes)
    return app


def _automation(settings: Settings, *, sealing: bool) -> Setup:
    """Return the settings that the diagnostic of automation shows: values of knobs and, for credentials, only whether
    they are set. `sealing`: whether there is a key to encrypt secrets with."""
    (unset,) = [one.unset for one in lacking(settings) if one.flow == "automation"] or [[]]
    needed = ("CRM_BASE_URL", "CRM_API_KEY", "ELEVENLABS_API_KEY", "LLM_API_KEY", "LLM_MODEL")
    wanted = ("SMTP_HOST", "MAIL_FROM", "ECLUSE_PUBLIC_URL", "PUSHER_APP_ID")
    knobs = [name for name in Settings.model_fields if name.startswith("AUTOMATION_")]
    knobs += ["CRM_CONCURRENCY", "TRANSCRIPTION_ELEVENLABS_RATE_LIMIT_PER_MINUTE", "ECLUSE_CATCH_UP_HOURS"]
    return Setup(
        automation_config(settings),
        present={name: name not in unset for name in needed}
        | {name: bool(getattr(settings, name)) for name in wanted}
        | {"ECLUSE_SECRET_KEY": sealing},
        knobs={name: getattr(settings, name) for name in knobs},
        unset=tuple(unset),
    )


def _upkeep(settings: Settings, database: Database, flows: Sequence[Flow], roles: frozenset[Role]) -> Upkeep:
    def check() -> list[Finding]:
        disk = [check_disk(str(database.server.data_dir))] if database.server is not None else []
        return [*check_settings(settings), check_descriptors(settings, roles), *disk]

    return Upkeep(
        retention_rules(settings, flows),
        keep_days(settings),
        trace_folders(settings),
        settings.ECLUSE_DB_POOL,
        check,
        partial(has_price, settings),
    )


class Server(uvicorn.Server):
    """A uvicorn server that disconnects realtime listeners and answers long polls before it shuts down: they would
    delay the stop until their clients disconnect."""

    def __init__(self, application: FastAPI) -> None:
        edge: Edge = application.state.edge
        config = uvicorn.Config(
            application,
            http=partial(Connection, edge),  # type: ignore[arg-type]
            ws=partial(Socket, edge),  # type: ignore[arg-type]
            forwarded_allow_ips=edge.limits.proxies,
            server_header=False,
            headers=[("X-Content-Type-Options", "nosniff")],
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=5,
            ws_max_size=LARGEST_FRAME,
            ws_per_message_deflate=False,  # events are small, but a compressor per socket is large
        )
        super().__init__(config)
        self._hub: Hub = application.state.realtime.hub
        self._polls: Polls = application.state.leasing.polls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # uvloop accepts one connection per socket and pass of the loop: a flood would fill the backlog, in which other
        # clients then wait for seconds. With duplicates of the socket, each pass accepts several.
        await super().startup([one.dup() for one in sockets or () for _ in range(ACCEPTED_AT_ONCE)])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self.servers:
            listener.close()  # first: a disconnected client must not reconnect to this process
        self._polls.stop()
        await self._hub.drain()
        await super().shutdown(sockets)


async def _leave_when_broken(kit: Kit) -> None:
    await kit.broken.wait()
    signal.raise_signal(signal.SIGTERM)  # a supervisor restarts the process; meanwhile other replicas take over


async def _watch(database: Database) -> None:
    while database.server is not None:
        await asyncio.sleep(WATCH_SECONDS)
        if not await asyncio.to_thread(database.server.is_running):
            log.error("embedded PostgreSQL: has died, starting it again")
            try:
                await asyncio.to_thread(database.server.ensure_running)
            except SetUpError as error:
                log.critical("embedded PostgreSQL: does not start", error=error.message)
