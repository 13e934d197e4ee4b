"""The figures of company enrichment: `python -m bench.enrichment`, or some of them by name.

crowd   1,000 requests of 3 tenants for 100 companies at once: time of the answers, calls per company, events
alone   time of the first answer for one company, when each register takes 100 ms
cached  time of reads of a request at 200 a second, from a replica with the role api, while another one works through
        jobs, as fast as the rate cap of the first register lets it
pace    share of the limit of 7 calls a second at Recherche d'entreprises that three replicas use, and how many calls
        it refused
flood   time from a request to its first call, behind another tenant's 5,000 requests
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import psycopg

from bench.lanes import control
from bench.named import main
from bench.reads import Caller, quantile, ready
from bench.serving import Running, cpu_of_server, cpu_seconds, postmaster, replica, sandbox
from ecluse.access import keys, tenants
from ecluse.sandbox.companies import is_siren

TENANTS = ("default", "acme", "zeta")
VENDORS = ("recherche_entreprises", "inpi", "api_entreprise")
PATH = "/v1/requests"
UNLIMITED = {
    "ECLUSE_LIMIT_KEY_REQUESTS": "0",
    "ECLUSE_LIMIT_TENANT_REQUESTS": "0",
    "RECHERCHE_ENTREPRISES_PER_SECOND": "10000",
    "API_ENTREPRISE_PER_MINUTE": "600000",
}
CAPPED = {**UNLIMITED, "RECHERCHE_ENTREPRISES_PER_SECOND": "7"}  # as in production: what all jobs together wait for
PACED = {**CAPPED, "ENRICHMENT_SYNC_WAIT_MS": "0"}
COMPLETED = """
SELECT count(*), count(DISTINCT (tenant_id, aggregate)) FROM events_outbox
WHERE event_type = 'CompanyEnrichmentCompleted'
"""
OPEN = "SELECT count(*) FROM enrichment_jobs WHERE ended_at IS NULL"
SIRENS = (one for one in (f"{n:09d}" for n in itertools.count(410_000_000)) if is_siren(one))
Figures = dict[str, Any]


@dataclass
class Bench:
    """Servers, the simulated registers, and a session per tenant with the first replica."""

    dsn: str
    registers: Running
    replicas: Sequence[Running]
    sessions: dict[str, aiohttp.ClientSession]
    failed: Counter[str] = field(default_factory=Counter)

    async def post(self, siren: str, tenant: str = "default") -> tuple[float, dict[str, Any]]:
        """Request a company; return the seconds until the answer, and the answer."""
        began, found = time.perf_counter(), {}
        try:
            async with self.sessions[tenant].post(PATH, json={"company_siren": siren}) as answer:
                found = await answer.json()
                if answer.status != 201:
                    self.failed[f"{answer.status} {found['error']['code']}"] += 1
        except aiohttp.ClientError as error:
            self.failed[type(error).__name__] += 1
        return time.perf_counter() - began, found

    async def post_all(self, sirens: Sequence[str], tenant: str = "default") -> None:
        """Request companies, ten at once; repeat what was refused because the server is busy."""
        line = asyncio.Semaphore(10)

        async def posted(siren: str) -> None:
            async with line:
                while "id" not in (await self.post(siren, tenant))[1]:  # noqa: ASYNC110 - repeats
                    await asyncio.sleep(0.5)

        await asyncio.gather(*(posted(siren) for siren in sirens))

    async def ended(self) -> None:
        """Wait until no job is open."""
        while (await self.row(OPEN))[0]:  # noqa: ASYNC110 - polls
            await asyncio.sleep(0.1)

    async def row(self, sql: str) -> tuple[Any, ...]:
        async with await psycopg.AsyncConnection.connect(self.dsn, autocommit=True) as connection:
            return await (await connection.execute(sql)).fetchone() or ()

    def calls(self, vendor: str) -> list[dict[str, Any]]:
        """Return the calls about companies in the ledger of a register."""
        found = control(self.registers.url, "GET", f"ledger?vendor={vendor}&kind=call&limit=10000")["entries"]
        return [one for one in found if one["ref"] != "login"]


def some(count: int) -> list[str]:
    return list(itertools.islice(SIRENS, count))


async def crowd(bench: Bench) -> Figures:
    await asyncio.gather(*(bench.post(siren, tenant) for siren in some(20) for tenant in TENANTS))  # warms up
    await bench.ended()
    (before, _), sirens = await bench.row(COMPLETED), some(100)
    asked = [(siren, TENANTS[n % 3]) for n, siren in enumerate(sirens * 10)]
    pairs = len(set(asked))
    server_, postgres = bench.replicas[0].pid, postmaster(bench.dsn)
    used = cpu_seconds(server_), cpu_of_server(postgres)
    answers = await asyncio.gather(*(bench.post(*one) for one in asked))
    await bench.ended()
    took = [seconds for seconds, _ in answers]
    completed, _ = await bench.row(COMPLETED)
    made = [Counter(one["ref"] for one in bench.calls(vendor) if one["ref"] in set(sirens)) for vendor in VENDORS]
    return {
        "answered": len(answers) - sum(bench.failed.values()),
        "failed": dict(bench.failed),
        "p50_s": round(quantile(took, 0.5), 2),
        "p99_s": round(quantile(took, 0.99), 2),
        "max_s": round(max(took), 2),
        "success_in_answer": sum(row.get("enrichment_status") == "SUCCESS" for _, row in answers),
        "calls_per_company": sorted({count for one in made for count in one.values()}),
        "companies_called": [len(one) for one in made],
        "completed": completed - before,
        "pairs": pairs,
        "server_cpu_s": round(cpu_seconds(server_) - used[0], 2),
        "postgres_cpu_s": round(cpu_of_server(postgres) - used[1], 2),
        "goal": "p99 3 s, one call per company, one Completed per pair of tenant and company",
    }


async def alone(bench: Bench) -> Figures:
    await asyncio.gather(*(bench.post(siren) for siren in some(20)))
    slow = [{"vendor": vendor, "kind": "latency", "seconds": 0.1} for vendor in VENDORS]
    control(bench.registers.url, "POST", "faults", slow)
    answers = [await bench.post(siren) for siren in some(20)]
    took = [seconds * 1000 for seconds, _ in answers]
    statuses = Counter(row["enrichment_status"] for _, row in answers)
    figures = {"statuses": dict(statuses), "p50_ms": round(quantile(took, 0.5)), "max_ms": round(max(took))}
    return {**figures, "goal": "SUCCESS, 500 ms"}


async def cached(bench: Bench) -> Figures:
    rows = [(await bench.post(siren))[1] for siren in some(30)]
    await bench.ended()
    paths = [f"{PATH}/{row['id']}" for row in rows]
    session, over, jobs = bench.sessions["default"], asyncio.Event(), 0

    async def work() -> None:
        nonlocal jobs
        while not over.is_set():  # at the other replica, as other callers do
            async with bench.sessions["other replica"].post(PATH, json={"company_siren": next(SIRENS)}) as answer:
                jobs += answer.status == 201

    async def reads(seconds: float) -> Caller:
        caller, began, asked, under_way = Caller(session), time.perf_counter(), 0, set()
        while (due := began + asked / 200) < began + seconds:
            await asyncio.sleep(due - time.perf_counter())
            task = asyncio.create_task(caller.ask("read", paths[asked % len(paths)], due))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
            asked += 1
        await asyncio.gather(*under_way)
        return caller

    await reads(2)
    gc.collect()
    gc.disable()  # no pauses of the caller that would count as the server's
    working = [asyncio.create_task(work()) for _ in range(12)]  # more than the cap lets through
    caller = await reads(15)
    over.set()
    await asyncio.gather(*working)
    took = caller.latencies["read"]
    figures = {f"p{share * 100:.0f}_ms": round(quantile(took, share), 1) for share in (0.5, 0.99)}
    return {**figures, "wrong": caller.wrong, "reads": len(took), "jobs_s": round(jobs / 15, 1), "goal": "p99 30 ms"}


async def pace(bench: Bench) -> Figures:
    control(bench.registers.url, "POST", "limits", {"vendor": "recherche_entreprises", "per_second": 7})
    await bench.post_all(some(350))
    await bench.ended()
    calls = bench.calls("recherche_entreprises")
    steady = [one["at"] for one in calls[20:]]
    share = (len(steady) - 1) / (steady[-1] - steady[0]) / 7
    refused = sum(one["status"] == 429 for one in calls)
    return {
        "share_of_rate": round(share, 3),
        "calls": len(calls),
        "answered_429": refused,
        "goal": "0.95, none refused",
    }


async def flood(bench: Bench) -> Figures:
    began, delays = time.perf_counter(), list[float]()
    many = asyncio.create_task(bench.post_all(some(5_000), "acme"))
    while not many.done() or len(delays) < 10:
        siren, asked_at = next(SIRENS), time.time()
        await bench.post(siren, "zeta")
        while not (first := [one for one in bench.calls(VENDORS[0]) if one["ref"] == siren]):  # noqa: ASYNC110 - polls
            await asyncio.sleep(0.1)
        delays.append(first[0]["at"] - asked_at)
        await asyncio.sleep(1)
    (left,) = await bench.row(OPEN)
    return {
        "failed": dict(bench.failed),
        "seconds_of_requests": round(time.perf_counter() - began, 1),
        "jobs_left": left,
        "others_asked": len(delays),
        "first_call_p50_s": round(quantile(delays, 0.5), 2),
        "first_call_max_s": round(max(delays), 2),
        "goal": "2 s",
    }


ALL, API, WORK = (), ("api",), ("worker", "scheduler", "api")
# What is measured, with which replicas and which knobs.
MEASUREMENTS: dict[str, tuple[Callable[[Bench], Awaitable[Figures]], Sequence[Sequence[str]], dict[str, str]]] = {
    "crowd": (crowd, [ALL], UNLIMITED),
    "alone": (alone, [ALL], UNLIMITED),
    "cached": (cached, [API, WORK], CAPPED),
    "pace": (pace, [ALL, ALL, ALL], PACED),
    "flood": (flood, [ALL], PACED),
}


def at(url: str) -> dict[str, str]:
    """Return the knobs with which the registers are the sandbox."""
    return {
        "RECHERCHE_ENTREPRISES_BASE_URL": f"{url}/recherche-entreprises",
        "INPI_BASE_URL": f"{url}/inpi",
        "INPI_USERNAME": "bench",
        "INPI_PASSWORD": "a-good-password",
        "API_ENTREPRISE_BASE_URL": f"{url}/api-entreprise",
        "API_ENTREPRISE_TOKEN": "a-good-token",
        "API_ENTREPRISE_RECIPIENT": "13002526500013",
    }


@contextlib.contextmanager
def running(dsn: str, url: str, replicas: Sequence[Sequence[str]], knobs: dict[str, str]) -> Iterator[list[Running]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(replica(dsn, url, {**at(url), **knobs}, roles)) for roles in replicas]


@contextlib.asynccontextmanager
async def opened(dsn: str, replicas: Sequence[Sequence[str]], knobs: dict[str, str]) -> AsyncIterator[Bench]:
    made = {}
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        for tenant in TENANTS:
            if tenant != "default":
                await tenants.create(connection, tenant, tenant)
                await connection.execute("UPDATE tenants SET api_entreprise_recipient = '13002526500013'")
            _, made[tenant] = await keys.create(connection, tenant, "operator", "bench")
    async with contextlib.AsyncExitStack() as stack:
        registers = stack.enter_context(sandbox())
        found = stack.enter_context(running(dsn, registers.url, replicas, knobs))

        async def session(url: str, tenant: str) -> aiohttp.ClientSession:
            connector, headers = aiohttp.TCPConnector(limit=0), {"Authorization": f"Bearer {made[tenant]}"}
            timeout = aiohttp.ClientTimeout(total=None)
            return await stack.enter_async_context(
                aiohttp.ClientSession(url, headers=headers, connector=connector, timeout=timeout)
            )

        sessions = {tenant: await session(found[0].url, tenant) for tenant in TENANTS}
        sessions["other replica"] = await session(found[-1].url, "default")
        for one in found:
            await ready(sessions["default"], one.url)
        yield Bench(dsn, registers, found, sessions)


async def measured(dsn: str, name: str) -> Figures:
    measure, replicas, knobs = MEASUREMENTS[name]
    async with opened(dsn, replicas, knobs) as bench:
        return await measure(bench)


if __name__ == "__main__":
    main("enrichment", __doc__, MEASUREMENTS, measured)
