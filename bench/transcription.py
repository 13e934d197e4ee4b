"""Figures of the transcription flow, at simulated vendors without latency: ``python -m bench.transcription WHAT``.

click   a fiche with 5 recordings, repeatedly: the time from the request to the answer of the API, from the request to
        the first event at a subscriber, and from the vendor's last answer to the terminal event (goals: 50, 500 and
        100 ms)
cap     600 calls a minute over 3 replicas: most calls in any 60 s, share of the cap used, 429s (goals: never above the
        cap, at least 95 %, none)
batch   1,000 fiches of 5 recordings in one request, with 500 worker slots (ECLUSE_HANDS): statements per recording
        (goal: at most 0.5; with the default of 200 it was 0.66), then, without counting them, recordings a second
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from typing import Any

import aiohttp
import psycopg
import uvloop

from bench.harness import fresh_database
from bench.reads import quantile
from bench.server import server
from bench.serving import sandbox, served
from bench.statements import count_statements
from ecluse.db.connect import normalise
from ecluse.migrations.runner import upgrade

NO_CAP = {
    "TRANSCRIPTION_ELEVENLABS_RATE_LIMIT_PER_MINUTE": "1000000",
    "TRANSCRIPTION_RECORDING_WORKER_CONCURRENCY": "1000",
    "TRANSCRIPTION_RECORDING_PER_FICHE_CONCURRENCY": "1000",
    "TRANSCRIPTION_FICHE_CONCURRENCY": "1000",
}
ENDED = "SELECT count(*) FROM runs WHERE flow = 'transcription' AND ended_at IS NOT NULL"


async def ledger(session: aiohttp.ClientSession, vendors: str) -> list[dict[str, Any]]:
    async with session.get(f"{vendors}/_sandbox/ledger?vendor=elevenlabs&kind=call&limit=1000000") as answer:
        found: list[dict[str, Any]] = (await answer.json())["entries"]
        return found


async def all_ended(dsn: str, wanted: int) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        while True:
            cursor = await connection.execute(ENDED)
            row = await cursor.fetchone()
            if row and row[0] >= wanted:
                return
            await asyncio.sleep(1)


async def batch(session: aiohttp.ClientSession, fiches: list[int]) -> None:
    body = {"fiche_ids": [str(fiche) for fiche in fiches]}
    async with session.post("/api/transcriptions/batch", json=body) as answer:
        assert answer.status == 200, await answer.text()
        assert (await answer.json())["queued"] == len(fiches)


async def click(dsn: str, clicks: int) -> dict[str, float]:
    answers, firsts, ends = [], [], []
    with sandbox() as (vendors, _):
        async with served(dsn, vendors, NO_CAP, 1) as (session, _):
            for fiche in range(9000, 9000 + clicks):
                heard: list[tuple[str, float]] = []
                over = asyncio.Event()
                listening = asyncio.create_task(listen(session, fiche, heard, over))
                await asyncio.sleep(1)
                began, at = time.perf_counter(), time.time()
                async with session.post(f"/api/transcriptions/{fiche}") as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.read()
                answers.append((time.perf_counter() - began) * 1000)
                await asyncio.wait_for(over.wait(), 30)
                listening.cancel()
                last = max(call["done_at"] for call in await ledger(session, vendors))
                firsts.append((heard[0][1] - at) * 1000)
                ends.append((next(when for name, when in heard if name == "transcription.completed") - last) * 1000)
    found: dict[str, float] = {}
    for name, values in (("answer", answers), ("first_event", firsts), ("terminal_after_last_answer", ends)):
        found |= {f"{name}_p50_ms": quantile(values, 0.5), f"{name}_max_ms": max(values)}
    return found


async def listen(
    session: aiohttp.ClientSession, fiche: int, heard: list[tuple[str, float]], over: asyncio.Event
) -> None:
    async with session.get(f"/api/events?channel=private-fiche-{fiche}") as stream:
        async for line in stream.content:
            if line.startswith(b"event: "):
                heard.append((line[7:].strip().decode(), time.time()))
                if heard[-1][0] == "transcription.completed":
                    over.set()


async def cap(dsn: str, seconds: float) -> dict[str, float]:
    per_minute = 600
    knobs = {**NO_CAP, "TRANSCRIPTION_ELEVENLABS_RATE_LIMIT_PER_MINUTE": str(per_minute)}
    numbers = [10_000 + 8 * n + 4 for n in range(int(per_minute / 60 * seconds / 5) + 5)]  # five recordings each
    with sandbox() as (vendors, _):
        async with served(dsn, vendors, knobs, 3) as (session, _):
            await batch(session, numbers)
            await asyncio.sleep(seconds)
            calls = await ledger(session, vendors)
    at = sorted(call["mono"] for call in calls)
    window = min(60.0, at[-1] - at[0])
    most = max(sum(start <= one < start + window for one in at) for start in at)
    steady = [one for one in at if one > at[0] + 2]
    used = len(steady) / (steady[-1] - steady[0]) * 60 / per_minute
    throttled = sum(call["status"] == 429 for call in calls)
    return {
        "calls": len(calls),
        "seconds": at[-1] - at[0],
        "most_in_a_window": most,
        "allowed_in_it": per_minute * window / 60,
        "used_percent": 100 * used,
        "throttled": throttled,
    }


async def batches(dsn: str, log: Any, fiches: int) -> dict[str, float]:
    numbers = [10_000 + 8 * n + 4 for n in range(fiches)]  # five recordings each
    knobs = {**NO_CAP, "ECLUSE_HANDS": os.environ.get("ECLUSE_HANDS", "500")}
    found: dict[str, float] = {}
    with sandbox() as (vendors, _):
        if log is not None:
            with count_statements(dsn, log) as counted:
                async with served(dsn, vendors, knobs, 1) as (session, _):
                    await batch(session, numbers)
                    await all_ended(dsn, fiches)
            found["statements_per_recording"] = counted.count / (5 * fiches)
        async with served(dsn, vendors, knobs, 1) as (session, _):
            began = time.perf_counter()
            await batch(session, [number + 8 * fiches for number in numbers])
            found["answer_ms"] = (time.perf_counter() - began) * 1000
            await all_ended(dsn, 2 * fiches if log is not None else fiches)
            found["recordings_s"] = 5 * fiches / (time.perf_counter() - began)
    return found


def main() -> None:
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="bench.transcription", description=__doc__, formatter_class=raw)
    parser.add_argument("what", choices=("click", "cap", "batch"))
    parser.add_argument("--dsn")
    parser.add_argument("--fiches", type=int, default=1_000, help="of the batch")
    parser.add_argument("--clicks", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=75, help="of the cap")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with server(options.dsn, None) as (dsn, log), fresh_database(dsn) as own:
        upgrade(normalise(own))
        match options.what:
            case "click":
                found = uvloop.run(click(own, options.clicks))
            case "cap":
                found = uvloop.run(cap(own, options.seconds))
            case _:
                found = uvloop.run(batches(own, log, options.fiches))
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:<36} {value:10.2f}")


if __name__ == "__main__":
    main()
