"""The figures of pricing: `python -m bench.pricing`, or some of them by name.

rate     share of the limit of 2 requests/s, burst 40, that three replicas use in steady state
cost     share of a shop's cost bucket that they use without that limit, and how many calls the shop throttled
preview  seconds of a preview of 10,000 variants; of the plan alone; of the page of that run
stop     calls that still go out once more targets have failed than `max_failure_rate` allows; 16 worker slots each
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from http.cookies import SimpleCookie
from typing import Any

import aiohttp
import psycopg
from psycopg.rows import dict_row

from bench.lanes import control
from bench.named import main
from bench.serving import Running, Served, cpu_seconds, sandbox, served
from ecluse.flows.pricing.rules import Terms, make_plan
from ecluse.vendors.shopify import PRICES, SET_PRICES, VERSION
from ecluse.vendors.shops import Variant
from ecluse.web.authentication import COOKIE

REPLICAS, HANDS = 3, 16
KNOBS = {
    "ECLUSE_SECRET_KEY": b64encode(bytes(range(32))).decode(),
    "ECLUSE_ALLOWED_NETWORKS": "127.0.0.0/8",
    "ECLUSE_LIMIT_KEY_REQUESTS": "0",
    "ECLUSE_LIMIT_TENANT_REQUESTS": "0",
}
FAST = {"PRICING_REQUESTS_PER_SECOND": "1000", "PRICING_BURST": "1000"}
ENDED = "SELECT ended_at IS NOT NULL AS ended FROM runs WHERE id = %s"
THROTTLED = "SELECT count(*) AS n FROM attempts WHERE error_code IN ('THROTTLED', '429')"
VARIANTS = [f"gid://shopify/ProductVariant/1{place:02d}" for place in range(10)]


class Bench:
    """Servers, the simulated shops, and the requests of a measurement."""

    def __init__(self, database: psycopg.Connection[dict[str, Any]], shops: Running, api: Served) -> None:
        self.database, self.shops, self.api = database, shops, api

    async def post(self, path: str, body: object) -> dict[str, Any]:
        async with self.api.session.post(f"/api/pricing{path}", json=body) as answer:
            found: dict[str, Any] = await answer.json()
            assert answer.status < 300, found
            return found

    async def rule(self, shop: str, selection: dict[str, Any]) -> dict[str, Any]:
        """A rule for a new project."""
        place = {"name": shop, "connector": "shopify", "base_url": f"{self.shops.url}/shopify/{shop}"}
        project = await self.post("/projects", {**place, "currency": "EUR", "access_token": "shpat_bench"})
        change = {"selection": selection, "change": {"kind": "percent", "percent": "-10"}}
        return await self.post("/rules", {"project_id": project["id"], "name": "Bench", **change})

    async def previewed(self, rule: dict[str, Any]) -> dict[str, Any]:
        """A rule run with its plan."""
        started = await self.post("/runs", {"rule_id": rule["id"]})
        await self.ended(started)
        async with self.api.session.get(f"/api/pricing/runs/{started['id']}") as answer:
            found: dict[str, Any] = await answer.json()
        return found

    async def queued(self, run: dict[str, Any], **limits: Any) -> dict[str, Any]:
        return await self.post(f"/runs/{run['id']}/queue", {"plan_hash": run["plan_hash"], **limits})

    async def ended(self, started: dict[str, Any]) -> None:
        while not self.rows(ENDED, int(started["run_id"]))[0]["ended"]:  # noqa: ASYNC110 - polls
            await asyncio.sleep(0.02)

    def rows(self, sql: str, *parameters: object) -> list[dict[str, Any]]:
        return self.database.execute(sql, parameters or None).fetchall()

    def calls(self, after: float = 0.0) -> list[dict[str, Any]]:
        found = control(self.shops.url, "GET", "ledger?vendor=shopify&kind=call&limit=10000")["entries"]
        return [one for one in found if one["at"] > after]


async def rate(bench: Bench) -> dict[str, Any]:
    """The apply of 500 targets in 50 products, from the 50th call on: the burst is over by then."""
    control(bench.shops.url, "POST", "limits", {"vendor": "shopify", "per_second": 2, "burst": 40})
    run = await bench.previewed(await bench.rule("unlimited-rate", {"tags": ["first-50"]}))
    began = time.time()
    await bench.ended(await bench.queued(run))
    calls = bench.calls(began)
    steady = [one["at"] for one in calls[50:]]
    share = (len(steady) - 1) / (steady[-1] - steady[0]) / 2
    refused = sum(one["status"] == 429 for one in calls)
    return {"share_of_rate": round(share, 3), "calls": len(calls), "answered_429": refused, "goal": "0.9"}


async def cost(bench: Bench) -> dict[str, Any]:
    """The apply of 5,000 targets in 500 products, in a shop whose bucket restores 500 points a second."""
    run = await bench.previewed(await bench.rule("plus-bench", {"tags": ["first-500"]}))
    read = await _cost(bench, PRICES, {"ids": VARIANTS})
    changed = [{"id": one, "price": "1.00"} for one in VARIANTS]
    write = await _cost(bench, SET_PRICES, {"productId": "gid://shopify/Product/1", "variants": changed})
    began = time.time()
    await bench.ended(await bench.queued(run))
    calls = bench.calls(began)
    steady = calls[len(calls) // 2 :]
    seconds = steady[-1]["at"] - steady[0]["at"]
    points = sum(write if one["ref"] else read for one in steady[1:])
    throttled = bench.rows(THROTTLED)[0]["n"]
    return {
        "share_of_cost_bucket": round(points / seconds / 500, 3),
        "throttled": throttled,
        "calls": len(calls),
        "seconds": round(calls[-1]["at"] - began, 1),
        "goal": "0.9, none throttled",
    }


async def _cost(bench: Bench, query: str, variables: dict[str, Any]) -> float:
    """Return what a call costs, in another shop."""
    url = f"{bench.shops.url}/shopify/unlimited-other/admin/api/{VERSION}/graphql.json"
    headers = {"X-Shopify-Access-Token": "shpat_bench", "X-Client": "bench"}
    async with bench.api.session.post(url, json={"query": query, "variables": variables}, headers=headers) as answer:
        return float((await answer.json())["extensions"]["cost"]["actualQueryCost"])


async def preview(bench: Bench) -> dict[str, Any]:
    """A preview of the whole catalogue, 10,000 variants; then its page."""
    rule = await bench.rule("unlimited-all", {"price_from": 0})
    began = time.monotonic()
    run = await bench.previewed(rule)
    seconds = time.monotonic() - began
    assert run["totals"]["selected"] == 10_000, run["totals"]
    terms = Terms.model_validate({"selection": {"price_from": 0}, "change": {"kind": "percent", "percent": "-10"}})
    variants = [Variant(str(n), str(n // 10), "", "", 1_000 + n, "EUR") for n in range(10_000)]
    began = time.monotonic()
    make_plan(terms, "EUR", variants)
    planned = time.monotonic() - began
    page = await _page(bench, f"/ui/pricing/runs/{run['id']}")
    return {"preview_s": round(seconds, 2), "plan_s": round(planned, 3), **page, "goal": "5 s, 1 s, 50 ms"}


async def _page(bench: Bench, path: str) -> dict[str, float]:
    """Return the median time of a page, and the CPU time of its server."""
    server_, took = bench.api.replicas[0], []
    key = bench.api.session.headers["Authorization"].removeprefix("Bearer ")
    cookie = SimpleCookie({COOKIE: key})
    bench.database.execute("ANALYZE")
    async with aiohttp.ClientSession(server_.url, headers={"Cookie": cookie.output(header="").strip()}) as session:
        cpu = 0.0
        for n in range(21):
            cpu = cpu_seconds(server_.pid) if n == 1 else cpu
            began = time.perf_counter()
            async with session.get(path) as answer:
                assert answer.status == 200
                await answer.read()
            took.append(time.perf_counter() - began)
        used = (cpu_seconds(server_.pid) - cpu) / 20
    return {"page_ms": round(1000 * statistics.median(took), 1), "page_cpu_ms": round(1000 * used, 1)}


async def stop(bench: Bench) -> dict[str, Any]:
    """5,000 targets in 500 products, all refused, with a limit of 2 % of failures: 10 products."""
    run = await bench.previewed(await bench.rule("unlimited-stop", {"tags": ["first-500"]}))
    products = [f"gid://shopify/Product/{n}" for n in range(1, 501)]
    refused = {"vendor": "shopify", "kind": "refused", "status": 422, "code": "no", "ids": products}
    control(bench.shops.url, "POST", "faults", [refused, {"vendor": "shopify", "kind": "latency", "seconds": 0.2}])
    began = time.time()
    await bench.ended(await bench.queued(run, max_failure_rate=0.02))
    sent = [one for one in bench.calls(began) if one["ref"]]
    exceeded = sorted(one["done_at"] for one in sent)[10]  # the 11th refusal is above the limit
    late = [one["at"] - exceeded for one in sent if one["at"] > exceeded]
    return {
        "products_sent": len(sent),
        "sent_after_exceeded": len(late),
        "last_sent_after_s": round(max(late, default=0.0), 2),
        "goal": f"what is in hand: at most {REPLICAS * HANDS}",
    }


MEASUREMENTS: dict[str, tuple[Callable[[Bench], Awaitable[dict[str, Any]]], dict[str, str]]] = {
    "rate": (rate, {}),
    "cost": (cost, FAST),
    "preview": (preview, FAST),
    "stop": (stop, {**FAST, "ECLUSE_HANDS": str(HANDS)}),
}


@contextlib.asynccontextmanager
async def opened(dsn: str, knobs: dict[str, str]) -> AsyncIterator[Bench]:
    with sandbox() as shops:
        async with served(dsn, shops.url, {**KNOBS, **knobs}, REPLICAS) as api:
            with psycopg.connect(dsn, autocommit=True, row_factory=dict_row) as database:
                yield Bench(database, shops, api)


async def measured(dsn: str, name: str) -> dict[str, Any]:
    measure, knobs = MEASUREMENTS[name]
    async with opened(dsn, knobs) as bench:
        return await measure(bench)


if __name__ == "__main__":
    main("pricing", __doc__, MEASUREMENTS, measured)
