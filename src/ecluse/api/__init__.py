"""The HTTP API: runs, schedules and leases of every flow, the routes of the flows, notifications and realtime. Routes
are thin; each declares the permission it needs and answers with rows as JSON. The models in `shapes.py` only describe
the answers, which are not validated against them while serving."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.routing import Route

from ecluse.access.keys import Keys
from ecluse.access.refusal_log import Refusals
from ecluse.access.surface import Surface
from ecluse.api import budgets, erasure, events, keys, lanes, limits, outcomes, pusher, runs, targets, trail, upkeep
from ecluse.api.addresses import surface as addresses
from ecluse.api.deliveries import surface as deliveries
from ecluse.api.document import Document, describe
from ecluse.api.endpoints import surface as endpoints
from ecluse.api.leases import surface as leases
from ecluse.api.me import surface as me
from ecluse.api.realtime import surface as realtime
from ecluse.api.redrives import surface as redrives
from ecluse.api.schedules import surface as schedules
from ecluse.db.connect import pool
from ecluse.db.pools import KEYS, READING, WRITING, share
from ecluse.db.reads import READ_SETTINGS, Reads
from ecluse.db.shares import WRITE_SETTINGS, Shares, Writes
from ecluse.engine.kit import Kit
from ecluse.flow import Package
from ecluse.flows.audits.surface import surface as audits
from ecluse.flows.automation.surface import surface as automation
from ecluse.flows.connections.project_surface import surface as projects
from ecluse.flows.connections.surface import surface as connections
from ecluse.flows.enrichment.surface import surface as enrichment
from ecluse.flows.fiches.surface import surface as fiches
from ecluse.flows.jobs.agent_surface import enrolment
from ecluse.flows.jobs.agent_surface import surface as agent
from ecluse.flows.jobs.job_surface import surface as jobs
from ecluse.flows.jobs.schedule_surface import surface as job_schedules
from ecluse.flows.pricing.run_surface import surface as rule_runs
from ecluse.flows.pricing.surface import surface as pricing
from ecluse.flows.transcriptions.surface import surface as transcriptions


def mount(app: FastAPI, packages: Sequence[Package] = ()) -> None:
    """Add the routes of the API and of the packages to the app, with their operations and listings, and its OpenAPI
    document."""
    app.state.operations, app.state.listings = {}, {}  # by name, for the forms and the tables of the pages
    of_pricing, of_jobs = (projects, pricing, rule_runs), (job_schedules, jobs, agent)
    flows = (connections, fiches, transcriptions, audits, automation, *of_pricing, *of_jobs)
    own = [one.surface for one in (limits, runs, targets, lanes, budgets, keys, trail, erasure, upkeep)]
    of_notify = (endpoints, addresses, deliveries)
    others = [package.surface for package in packages if package.surface is not None]
    # Routes are searched one by one: those that programs call most are first.
    parts: list[Any] = [enrichment, me, *own, redrives, outcomes, leases, schedules, *flows, *of_notify]
    parts += [realtime, events, pusher]
    for part in [*parts, *others]:
        app.router.routes += part.routes.routes  # flat: an included router would be searched at each request
        if isinstance(part, Surface):
            app.state.operations |= part.operations
            app.state.listings |= part.listings
    app.router.routes += enrolment.routes

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = describe(app)
        return app.openapi_schema

    app.openapi = described  # type: ignore[method-assign]
    app.router.routes.append(Route("/openapi.json", Document(app).send))


@asynccontextmanager
async def serving(app: FastAPI, kit: Kit) -> AsyncIterator[None]:
    """Open the resources that the routes need besides the kit, for the duration of the context: pools for reads, writes
    and keys, and the cache of API keys."""
    reading, writing = min(READING, kit.db_pool), min(WRITING, kit.db_pool)
    async with (
        pool(kit.dsn, size=reading, settings=READ_SETTINGS, checked=False) as quick,
        pool(kit.dsn, size=writing, settings=WRITE_SETTINGS) as writes,
        pool(kit.dsn, size=KEYS, settings=READ_SETTINGS, checked=False) as known,
    ):
        app.state.reads = Reads(quick, writes, Shares("reads_at_once", share(reading)))
        app.state.writes = Writes(writes, Shares("writes_at_once", share(writing)))
        app.state.keys = keys = Keys(Reads(known, writes), writes, kit.clock)
        app.state.refusals = refusals = Refusals(writes)
        yield
        await refusals.settle()
        await keys.settle()
