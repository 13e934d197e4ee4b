"""How a rule run is started for the fault cases: a project at the sandbox, a plan made of the prices that the shop has,
and its apply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime

from ecluse.base.errors import TransientError
from ecluse.db.connect import Connection
from ecluse.engine import Run, Start, load_run
from ecluse.flows.connections import projects
from ecluse.flows.pricing import executions, runs
from ecluse.flows.pricing.rules import Plan, Planned, plan_hash
from ecluse.flows.pricing.runs import NewRun
from ecluse.vendors.connectors import opened
from ecluse.vendors.shops import Shop, Variant
from tests.support.pricing_rows import BY
from tests.support.vendor_clients import LOOPBACK, SECRETS

VARIANTS = 10  # of a product
TOKEN = "shpat_faults"  # noqa: S105
OF_START = "UPDATE runs SET event_key = %s WHERE id = %s"


def variant(n: int) -> str:
    return f"gid://shopify/ProductVariant/{(n - 1) // VARIANTS + 1}{(n - 1) % VARIANTS:02d}"


def product(of_variant: str) -> str:
    return f"gid://shopify/Product/{of_variant.rpartition('/')[2][:-2]}"


async def apply(connection: Connection, start: Start, url: str) -> Run:
    """Queue a rule run that makes each wanted variant a cent dearer; return the run of its apply."""
    shop = ("shopify", f"{url}/shopify/unlimited", TOKEN, "EUR")
    async with opened(*shop, allowed_networks=LOOPBACK, now=lambda: datetime.now(UTC)) as client:
        prices = await _prices(client, start.input["variants"])
    targets = [Planned(Variant(one, product(one), "", one, price, "EUR"), price, price + 1)
               for one, price in prices.items()]  # fmt: skip
    plan = Plan(targets, [], plan_hash("EUR", targets))
    async with connection.transaction():
        project = await _project(connection, start.tenant_id, shop[1])
        new = NewRun(start.tenant_id, project, "EUR", None, {}, plan, "QUEUED")
        rule_run = await runs.create_rule_run(connection, new, BY)
        made = await executions.start(connection, start.flow, start.tenant_id, rule_run, "apply", BY)
        await connection.execute(OF_START, (start.event_key, made))
        return await load_run(connection, made)


async def _prices(client: Shop, variants: Sequence[str]) -> Mapping[str, int]:
    """As often as it takes: the faults of a case are in force already."""
    found: dict[str, int] = {}
    while left := [one for one in variants if one not in found]:
        with suppress(TransientError):
            found |= await client.prices(left[: client.most_read])
    return found


async def _project(connection: Connection, tenant: str, url: str) -> int:
    """The one project, made for the first run."""
    known = await (await connection.execute("SELECT id FROM pricing_projects")).fetchone()
    if known is not None:
        return int(known[0])
    given = {"name": "Shop", "connector": "shopify", "currency": "EUR", "token_ends": None, "base_url": url}
    row = await projects.create(connection, tenant, given, "a test")
    await SECRETS.put(connection, tenant, projects.secret_name(row["id"]), TOKEN)
    return int(row["id"])
