"""How much one tenant under full load slows another: `python -m bench.fairness` or `make bench-fairness`.

One server with all roles and at most 1,024 open files. For `--seconds`, the tenant `mallory` sends what ATTACKS lists,
from a process of its own: its keys are valid, and their roles allow its requests. Meanwhile `alice`, from another
address, asks for `/api/me` twenty times a second, timed from the instant at which a request was due, starts a run a
second, and has 20 schedules due every minute. GOALS, for two cores, are printed as reached or missed; if one is missed,
the exit code is 1.

A real attacker has machines of its own. Here its process runs with `nice`, so that it gets only the time of the cores
that the server, the database and the victim leave. `cores` says how much each of them used.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import psycopg
import uvloop

from bench.cores import per_second, used
from bench.goals import judged, show
from bench.harness import fresh_database
from bench.reads import process, quantile, ready
from bench.server import server
from ecluse.access import keys, tenants
from ecluse.base.cron import ZONE_RULES
from ecluse.db.connect import normalise
from ecluse.migrations.runner import upgrade

WARM_UP_SECONDS = 2.0
ME_PER_SECOND, RUNS_PER_SECOND = 20, 1
KEYS = 10  # of the attacker
SCHEDULES, IDS = 200, 50_000  # of the attacker: its longest list
BATCH = 10_000
SILENT = 1_100  # connections; the server may open FILES
FILES = 1_024
# Each address has a share of the connections; 127.0.0.1 is that of a proxy, which has no limit.
VICTIMS_ADDRESS, ATTACKERS_ADDRESS = ("127.0.0.2", 0), ("127.0.0.3", 0)
PLAN = {"name": "many", "fiche_selection": {"mode": "manual", "fiche_ids": [f"{n:06d}" for n in range(IDS)]}}

# To vendors that it never reaches: its runs fail, each with all its rows.
CONNECT = """
INSERT INTO connections (tenant_id, kind, base_url, created_by, created_at, updated_by, updated_at)
SELECT 'mallory', kind, 'https://vendor.invalid', 'bench', now(), 'bench', now()
FROM unnest('{crm,speech,llm}'::text[]) AS k(kind)
"""
COPY_SCHEDULES = """
WITH made AS (
    INSERT INTO schedules (tenant_id, flow, name, timezone, input, enabled, zone_rules, handled_until, created_at,
                           updated_at)
    SELECT tenant_id, flow, name || n, timezone, input, enabled, zone_rules, handled_until, created_at, updated_at
    FROM schedules, generate_series(2, %s::int) n WHERE id = %s RETURNING id)
INSERT INTO automation_settings (id, {columns})
SELECT made.id, {copied} FROM made, automation_settings a WHERE a.id = %s
"""
COLUMNS = """
SELECT string_agg('a.' || column_name, ', '), string_agg(column_name::text, ', ') FROM information_schema.columns
WHERE table_name = 'automation_settings' AND column_name <> 'id' AND is_generated = 'NEVER'
"""
# Due at every full minute.
DUE = """
INSERT INTO schedules (tenant_id, flow, name, cron, timezone, input, next_due_at, zone_rules, handled_until, created_at,
                       updated_at)
SELECT 'alice', 'bench', 'n' || n, '* * * * *', 'UTC', '{"items": 1, "io_ms": 0}',
       date_trunc('minute', now()) + interval '1 minute', %s, now(), now(), now() FROM generate_series(1, 20) n
"""
RUNS = """
SELECT extract(epoch FROM coalesce({instant}, ecluse_now()) - created_at)::float8 FROM runs
WHERE tenant_id = 'alice' AND schedule_id IS NULL
"""
FIRED = """
SELECT extract(epoch FROM coalesce(d.decided_at, ecluse_now()) - m.due_at)::float8
FROM schedules s CROSS JOIN LATERAL generate_series(
    date_trunc('minute', s.created_at) + interval '1 minute', ecluse_now(), interval '1 minute') AS m(due_at)
LEFT JOIN schedule_slots d ON d.schedule_id = s.id AND d.due_at = m.due_at WHERE s.tenant_id = 'alice'
"""


@dataclass
class Attacker:
    """The attacking tenant: its sessions, one per key, and the answers that it got."""

    sessions: list[aiohttp.ClientSession]
    cookies: list[dict[str, str]]
    port: int
    until: float
    answers: Counter[str] = field(default_factory=Counter)

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.until

    async def send(self, name: str, method: str, path: str, n: int, **sent: Any) -> None:
        """Send one request with the n-th key and count how it was answered; wait a little after a refusal."""
        try:
            async with self.sessions[n % KEYS].request(method, path, **sent) as answer:
                await answer.read()
                self.answers[f"{name} {answer.status}"] += 1
                refused = answer.status == 429
        except (aiohttp.ClientError, TimeoutError) as error:
            self.answers[f"{name} {type(error).__name__}"] += 1
            refused = True
        if refused:
            await asyncio.sleep(0.2)


Attack = Callable[[Attacker, int], Awaitable[None]]


async def long_lists(attacker: Attacker, n: int) -> None:
    await attacker.send("long lists", "GET", "/api/automation/schedules?limit=200", n)


async def batches(attacker: Attacker, n: int) -> None:
    fiche_ids = [f"{time.time_ns()}-{m}" for m in range(BATCH)]
    await attacker.send("batches", "POST", "/api/transcriptions/batch", n, json={"fiche_ids": fiche_ids})


async def large_bodies(attacker: Attacker, n: int) -> None:
    await attacker.send("large bodies", "POST", "/api/runs", n, data=LARGE_BODY, headers=JSON)


async def repeated_keys(attacker: Attacker, n: int) -> None:
    second = f"{int(time.time() / 5)}"  # a batch every five seconds, repeated as long as it takes and longer
    body = json.dumps({"fiche_ids": [f"{second}-{m}" for m in range(BATCH)]}).encode()
    headers = {**JSON, "Idempotency-Key": f"again-{second}"}
    await attacker.send("repeated keys", "POST", "/api/transcriptions/batch", n, data=body, headers=headers)


async def many_starts(attacker: Attacker, n: int) -> None:
    run = {"flow": "bench", "input": {"items": 1, "io_ms": 0}}
    await attacker.send("many starts", "POST", "/api/runs", n, json=run)


async def small_reads(attacker: Attacker, n: int) -> None:
    await attacker.send("small reads", "GET", "/api/runs", n)


async def page_streams(attacker: Attacker, n: int) -> None:
    """Open a stream and read it until the end."""
    try:
        async with attacker.sessions[n % KEYS].get("/ui/runs/live", headers=attacker.cookies[n % KEYS]) as answer:
            attacker.answers[f"page streams {answer.status}"] += 1
            if answer.status == 429:
                await asyncio.sleep(float(answer.headers["Retry-After"]))  # as browsers wait before they reconnect
            if answer.status == 200:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + attacker.until - time.monotonic()):
                    async for _ in answer.content.iter_any():
                        pass
    except TimeoutError:
        return
    except aiohttp.ClientError as error:
        attacker.answers[f"page streams {type(error).__name__}"] += 1
    await asyncio.sleep(1)


async def silent_connections(attacker: Attacker, _: int) -> None:
    """Open a connection and send nothing until the server closes it."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", attacker.port, local_addr=ATTACKERS_ADDRESS)
    except OSError as error:
        attacker.answers[f"silent connections {type(error).__name__}"] += 1
    else:
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()
        attacker.answers["silent connections closed"] += 1
    await asyncio.sleep(1)


JSON = {"Content-Type": "application/json"}
LARGE_BODY = json.dumps({"flow": "bench", "input": {"more": [{"a": n} for n in range(68_000)]}}).encode()
# Each attack and how many clients repeat it; `page_streams` is repeated by --streams.
ATTACKS: dict[Attack, int] = {
    long_lists: 8,
    batches: 4,
    large_bodies: 4,
    repeated_keys: 24,
    many_starts: 16,
    small_reads: 16,
    silent_connections: SILENT,
    page_streams: 0,
}


async def attack(url: str, given: list[str], seconds: float, chosen: dict[str, int]) -> Counter[str]:
    timeout, connector = aiohttp.ClientTimeout(None), aiohttp.TCPConnector(limit=0, local_addr=ATTACKERS_ADDRESS)
    sessions = [
        aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {key}"}, connector=connector, timeout=timeout)
        for key in given
    ]
    cookies = [{"Cookie": f"ecluse_key={key}"} for key in given]
    attacker = Attacker(sessions, cookies, int(url.rpartition(":")[2]), time.monotonic() + seconds)

    async def repeat(one: Attack, n: int) -> None:
        while not attacker.over:
            await one(attacker, n)

    tasks = [asyncio.create_task(repeat(one, n)) for one in ATTACKS for n in range(chosen.get(one.__name__, 0))]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for session in sessions:
        await session.close()
    return attacker.answers


def attack_from_here(told: Any, *arguments: Any) -> None:
    os.nice(19)
    told.put((uvloop.run(attack(*arguments)), time.process_time()))


class Victim:
    def __init__(self, session: aiohttp.ClientSession, until: float) -> None:
        self.session, self.until = session, until
        self.seconds: dict[str, list[float]] = {"me": [], "start": []}
        self.answers: Counter[str] = Counter()

    async def ask(self, name: str, due: float, method: str, path: str, **sent: Any) -> None:
        async with self.session.request(method, path, **sent) as answer:
            await answer.read()
            self.answers[f"{name} {answer.status}"] += 1
        self.seconds[name].append(time.monotonic() - due)

    async def steadily(self, name: str, rate: float, method: str, path: str, **sent: Any) -> None:
        began = time.monotonic()
        tasks: list[asyncio.Task[None]] = []
        while (due := began + len(tasks) / rate) < self.until:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.append(asyncio.create_task(self.ask(name, due, method, path, **sent)))
        await asyncio.gather(*tasks)


async def new_keys(dsn: str) -> tuple[str, list[str]]:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        for tenant in ("alice", "mallory"):
            await tenants.create(connection, tenant)
        await connection.execute(CONNECT)
        _, good = await keys.create(connection, "alice", "operator", "bench")
        bad = [(await keys.create(connection, "mallory", "operator", f"bench {n}"))[1] for n in range(KEYS)]
    return good, bad


async def prepare(dsn: str, url: str, key: str) -> None:
    """Give the attacker its lanes and its schedules, all but one copied in the database."""
    async with aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {key}"}) as session:
        async with session.post("/api/transcriptions/batch", json={"fiche_ids": ["first"]}) as answer:
            assert answer.status == 200, await answer.text()
        async with session.post("/api/automation/schedules", json=PLAN) as answer:
            schedule = (await answer.json())["id"]
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        ((copied, columns),) = await (await connection.execute(COLUMNS)).fetchall()
        statement = COPY_SCHEDULES.format(copied=copied, columns=columns)
        await connection.execute(statement, (SCHEDULES, schedule, schedule))


async def figures(dsn: str, statement: str) -> list[float]:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        return [row[0] for row in await (await connection.execute(statement)).fetchall()]


async def measure(dsn: str, seconds: float, chosen: dict[str, int]) -> dict[str, Any]:
    good, bad = await new_keys(dsn)
    with process(dsn, "api", "scheduler", "worker", unlimited=False, files=FILES) as port:
        url = f"http://127.0.0.1:{port}"
        connector = aiohttp.TCPConnector(limit=0, local_addr=VICTIMS_ADDRESS)
        headers = {"Authorization": f"Bearer {good}"}
        async with aiohttp.ClientSession(url, headers=headers, connector=connector) as session:
            await ready(session, url)
            await prepare(dsn, url, bad[0])
            before = await used(session)
            spawn = multiprocessing.get_context("spawn")
            told = spawn.Queue()
            other = spawn.Process(target=attack_from_here, args=(told, url, bad, seconds + WARM_UP_SECONDS, chosen))
            other.start()
            await asyncio.sleep(WARM_UP_SECONDS)
            async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
                await connection.execute(DUE, (ZONE_RULES,))
            victim = Victim(session, time.monotonic() + seconds)
            run = {"flow": "bench", "input": {"items": 1, "io_ms": 0}}
            await asyncio.gather(
                victim.steadily("me", ME_PER_SECOND, "GET", "/api/me"),
                victim.steadily("start", RUNS_PER_SECOND, "POST", "/api/runs", json=run),
            )
            attacks, attacker = await asyncio.to_thread(told.get)
            await asyncio.to_thread(other.join)
            cores = per_second(before, await used(session), attacker)
            starts, ends = [await figures(dsn, RUNS.format(instant=one)) for one in ("started_at", "ended_at")]
            fires = await figures(dsn, FIRED)
    found = {
        "GET /api/me": victim.seconds["me"],
        "POST /api/runs": victim.seconds["start"],
        "run taken up after": starts,
        "run of one call ended after": ends,
        "schedule fired after": fires,
    }
    milliseconds = {
        name: {f"p{share * 100:.0f}": round(quantile(values, share) * 1000) for share in (0.5, 0.99, 1.0)}
        for name, values in found.items()
        if values  # no full minute in a short run
    }
    return {
        "milliseconds": milliseconds,
        "goals": judged(milliseconds, victim.answers),
        "cores": cores,
        "answers": dict(sorted(victim.answers.items())),
        "attacks": dict(sorted(attacks.items())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.fairness", description=__doc__)
    parser.add_argument("--dsn")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--streams", type=int, default=2_000)
    names = [one.__name__ for one in ATTACKS]
    parser.add_argument("--only", choices=[*names, "none"], nargs="*", default=names, help="`none`: a calm server")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    counts = {one.__name__: many or options.streams for one, many in ATTACKS.items()}
    with server(options.dsn, None) as (dsn, _), fresh_database(dsn) as own:
        upgrade(normalise(own))
        chosen = {name: count for name, count in counts.items() if name in options.only}
        found = uvloop.run(measure(own, options.seconds, chosen))
    if options.json:
        print(json.dumps(found))
    else:
        show(found)
    sys.exit("missed" in found["goals"].values())


if __name__ == "__main__":
    main()
