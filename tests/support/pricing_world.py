"""An engine that changes prices in a simulated shop: projects, rules, previews, applies, and what the shop's ledger
says of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

from ecluse.db.connect import Connection
from ecluse.db.query import Row
from ecluse.engine import Backoff, load_run
from ecluse.engine.kit import Kit
from ecluse.engine.work.completion import end_by_operator
from ecluse.flows.connections import projects
from ecluse.flows.connections.clients import Setup
from ecluse.flows.connections.shops import Shops
from ecluse.flows.pricing import executions, runs
from ecluse.flows.pricing.flow import Config, Pricing
from ecluse.flows.pricing.rules import RETRY, Terms
from ecluse.flows.pricing.runs import Limits
from ecluse.flows.pricing.states import validate_run_state
from ecluse.testing.sandbox import SandboxProcess
from ecluse.vendors.connectors import opened
from ecluse.vendors.shops import Shop
from tests.support.pricing_rows import BY
from tests.support.runs import wait_for_run
from tests.support.vendor_clients import LOOPBACK, SECRETS

TENANT, NO_LIMITS = "default", Limits()
PATIENCE = timedelta(seconds=30)
NAMES = count()
QUICK = replace(RETRY, base=0.02, jitter=0.0, throttled=Backoff(base=0.02))
SPEEDY: dict[str, Any] = {
    "per_second": 10_000.0,
    "burst": 1_000,
    "call": timedelta(seconds=2),
    "retry": QUICK,
    "poll": timedelta(seconds=0.2),
    "pause": timedelta(seconds=0.3),
}
TEN_PERCENT_OFF = {
    "selection": {"products": ["gid://shopify/Product/1"], "tags": ["first-50"]},
    "change": {"kind": "percent", "percent": "-10"},
}


def pricing(*, quiet: timedelta = timedelta(seconds=0.4), **config: Any) -> Pricing:
    made = Config(**{**SPEEDY, **config})
    setup = Setup(read_secret=SECRETS.get, allowed_networks=LOOPBACK)
    flow = Pricing(made, partial(Shops, setup, made.call.total_seconds()))
    # A call that was cut off is read back after a moment.
    for name in ("canary", "apply", "rollback"):
        stage = getattr(flow, name)
        setattr(flow, name, replace(stage, work=replace(stage.work, quiet=quiet)))
    flow.flow = replace(
        flow.flow, stages=(flow.catalogue, flow.canary, flow.apply, flow.rollback, *flow.flow.stages[4:])
    )
    return flow


@dataclass
class World:
    kit: Kit
    made: Pricing
    sandbox: SandboxProcess
    query: Callable[..., list[Any]]

    async def project(self, connection: Connection, place: str = "/shopify/unlimited", **given: Any) -> int:
        """A project at the sandbox, stored without a test."""
        new = {"name": f"Shop {next(NAMES)}", "connector": "shopify", "currency": "EUR", "token_ends": None, **given}
        async with connection.transaction():
            row = await projects.create(connection, TENANT, {**new, "base_url": self.sandbox.url + place}, "a test")
            await SECRETS.put(connection, TENANT, projects.secret_name(row["id"]), "shpat_test")
        return int(row["id"])

    async def rule(self, connection: Connection, project: int, terms: Row = TEN_PERCENT_OFF) -> int:
        given, name = Terms.model_validate(terms), f"Rule {next(NAMES)}"
        async with connection.transaction():
            return int((await runs.create_rule(connection, TENANT, project, name, given, "a test"))["id"])

    async def previewed(self, connection: Connection, project: int, terms: Row = TEN_PERCENT_OFF) -> Row:
        """A run of a new rule, whose preview has ended."""
        rule = await self.rule(connection, project, terms)
        async with connection.transaction():
            run = await executions.new_preview(connection, TENANT, rule, BY)
            started = await executions.start(connection, self.made.flow, TENANT, run, "preview", BY)
        await wait_for_run(self.kit, started, PATIENCE)
        return await runs.show_run(connection, TENANT, run)

    async def queued(
        self, connection: Connection, run: Row, targets: Sequence[int] | None = None, limits: Limits = NO_LIMITS
    ) -> int:
        """Queue a previewed run; return the id of the engine run that applies it."""
        async with connection.transaction():
            await runs.queue_for_processing(connection, TENANT, run["id"], run["plan_hash"], targets, BY, limits)
            return await executions.start(connection, self.made.flow, TENANT, run["id"], "apply", BY)

    async def applied(
        self, connection: Connection, run: Row, targets: Sequence[int] | None = None, **limits: Any
    ) -> Row:
        """The run after its apply has ended."""
        return await self.over(connection, run, await self.queued(connection, run, targets, Limits(**limits)))

    async def retried(self, connection: Connection, run: Row, targets: Sequence[int] | None = None) -> Row:
        async with connection.transaction():
            await runs.retry_failed(connection, TENANT, run["id"], targets, BY)
            started = await executions.start(connection, self.made.flow, TENANT, run["id"], "apply", BY)
        return await self.over(connection, run, started)

    async def rolled_back(
        self, connection: Connection, run: Row, targets: Sequence[int] | None = None, *, forced: bool = False
    ) -> Row:
        given = {"target_ids": targets, "forced": forced}
        async with connection.transaction():
            await runs.check_rollback(connection, TENANT, run["id"], targets)
            started = await executions.start(connection, self.made.flow, TENANT, run["id"], "rollback", BY, **given)
        return await self.over(connection, run, started)

    async def over(self, connection: Connection, run: Row, started: int) -> Row:
        """The run after an execution; its status and those of its targets do not contradict each other."""
        await wait_for_run(self.kit, started, PATIENCE)
        await validate_run_state(connection, run["id"])
        return await runs.show_run(connection, TENANT, run["id"])

    async def ended_by_operator(self, connection: Connection, run: Row, started: int) -> Row:
        await end_by_operator(
            connection, self.made.flow, await load_run(connection, started), "enough", by="an operator"
        )
        return await self.over(connection, run, started)

    @asynccontextmanager
    async def client(self, place: str = "/shopify/unlimited") -> AsyncIterator[Shop]:
        """A client of the shop, of another party."""
        given = ("shopify", self.sandbox.url + place, "shpat_other", "EUR")
        async with opened(*given, allowed_networks=LOOPBACK, now=self.kit.clock.now) as found:
            yield found

    async def prices(self, run: Row) -> list[int]:
        """The prices that the shop has for the targets of a run."""
        ids = [one for (one,) in self.targets(run, "variant_id")]
        async with self.client() as client:
            found = await client.prices(ids)
        return [found[one] for one in ids]

    def writes(self) -> Counter[str]:
        """How often each variant was written in the shop."""
        return Counter(one["ref"] for one in self.sandbox.ledger(vendor="shopify", kind="effect"))

    def targets(self, run: Row, columns: str = "status") -> list[Any]:
        return self.query(f"SELECT {columns} FROM rule_targets WHERE rule_run_id = %s ORDER BY id", run["id"])  # noqa: S608
