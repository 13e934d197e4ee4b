"""Projects, plans and rule runs of the pricing tests, as rows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg

from ecluse.db.connect import Connection
from ecluse.db.query import fetch_column, fetch_value
from ecluse.flows.pricing.rules import Plan, Terms, make_plan
from ecluse.flows.pricing.runs import NewRun, create_rule_run
from ecluse.flows.pricing.states import By, Move, move_runs, move_targets
from ecluse.vendors.shops import Variant

BY = By("key 7", "api", "request-1")
WORKER = By("worker", "engine")
RULE: dict[str, Any] = {"selection": {"price_from": 0}, "change": {"kind": "percent", "percent": "-10"}}
PROJECT = """
INSERT INTO pricing_projects (tenant_id, name, connector, base_url, currency, created_by, created_at, updated_by,
                              updated_at)
VALUES (%s, %s, 'shopify', 'https://shop.example', 'EUR', 'a test', ecluse_now(), 'a test', ecluse_now()) RETURNING id
"""
TARGETS = "SELECT id FROM rule_targets WHERE rule_run_id = %s ORDER BY id"


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[Connection]:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        yield connection


def plan_of(count: int) -> Plan:
    """A plan for this many variants, ten per product; one more is too cheap to change."""
    listed = [Variant(f"v{n}", f"p{n // 10}", f"s{n}", f"Variant {n}", 1_000 + n, "EUR") for n in range(count)]
    free = Variant("free", "p0", "free", "Free", 0, "EUR")
    return make_plan(Terms.model_validate(RULE), "EUR", [*listed, free])


async def new_project(connection: Connection, tenant: str = "default", name: str = "Shop") -> int:
    return int(await fetch_value(connection, PROJECT, (tenant, name)))


async def new_run(connection: Connection, project: int, count: int = 4, status: Any = "PREVIEW", by: By = BY) -> int:
    async with connection.transaction():
        new = NewRun("default", project, "EUR", None, RULE, plan_of(count), status)
        return await create_rule_run(connection, new, by)


async def ended(connection: Connection, run: int, failed: int, code: str = "VENDOR_REFUSED") -> list[int]:
    """Apply a queued run: the first targets fail; return those."""
    targets = await fetch_column(connection, TARGETS, (run,))
    await move_runs(connection, {run: "APPLYING"}, WORKER)
    moves = [Move(one, ("APPLYING", "FAILED"), code, "no") for one in targets[:failed]]
    moves += [Move(one, ("APPLYING", "APPLIED")) for one in targets[failed:]]
    await move_targets(connection, moves, WORKER)
    await move_runs(connection, {run: "PARTIAL" if failed < len(targets) else "FAILED"}, WORKER)
    return targets[:failed]
