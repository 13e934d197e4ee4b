"""A fetched fiche in the tables: everything the CRM said, nothing of what was transcribed."""

from __future__ import annotations

import asyncio
import random

import psycopg
import pytest

from ecluse.flows.fiches.fetch import Fetched, save_details
from tests.support.fiche_rows import call, details, save

RECORDINGS = "SELECT call_id, recording_url, removed_at IS NOT NULL FROM recordings ORDER BY call_id"
TRANSCRIBE = """
UPDATE recordings SET has_transcription = true, transcription_id = 't-' || call_id, transcription_text = 'said ' || id,
    transcription_data = '{"words": []}', transcribed_at = ecluse_now() WHERE call_id = ANY(%s)
"""
TRANSCRIBED = """
SELECT id, call_id, has_transcription, transcription_id, transcription_text, transcription_data, transcribed_at
FROM recordings ORDER BY id
"""


@pytest.mark.req("AUT-51", "TRX-41", "TRX-42", "G-90")
async def test_a_fetched_fiche_is_stored_with_its_information_and_recordings(connection, query, one):
    answer = details(
        call("c1", start_time="2026-03-02T09:30:00+01:00", duration_s=61.5), call("c2", ""), groupe="B", ville="Lyon"
    )
    (number,) = await save(connection, ("171", answer))
    assert one("SELECT id, fiche_id, details_success, recordings_count, has_recordings FROM fiche_cache") == (
        number, "171", True, 2, True
    )  # fmt: skip
    assert one("SELECT fetched_at IS NOT NULL AND groupe IS NULL AND raw_data IS NULL FROM fiche_cache")
    assert one("SELECT groupe, attribution_user_id, data FROM fiche_cache_information") == (
        "B",
        "7",
        answer["information"],
    )
    rows = query("SELECT call_id, recording_url, start_time::text, duration_s FROM recordings ORDER BY call_id")
    assert rows == [("c1", "https://calls.test/a.mp3", "2026-03-02 08:30:00+00", 61.5), ("c2", "", None, None)]


@pytest.mark.req("G-82")
async def test_a_recording_gone_upstream_is_marked_and_unmarked_when_it_returns(connection, query, one):
    await save(connection, ("1", details(call("a"), call("b"))), ("2", details(call("a"))))
    query(TRANSCRIBE, ["b"])
    before = query(TRANSCRIBED)
    await save(connection, ("1", details(call("a"))))
    assert query("SELECT call_id, removed_at IS NOT NULL FROM recordings ORDER BY id") == [
        ("a", False), ("b", True), ("a", False)
    ]  # fmt: skip
    assert one("SELECT recordings_count FROM fiche_cache WHERE fiche_id = '1'") == 1
    since = one("SELECT removed_at FROM recordings WHERE call_id = 'b'")
    await save(connection, ("1", details()))
    assert one("SELECT removed_at FROM recordings WHERE call_id = 'b'") == since, "it went when it went"
    assert one("SELECT has_recordings FROM fiche_cache WHERE fiche_id = '1'") is False
    await save(connection, ("1", details(call("b"))))
    assert query("SELECT call_id, removed_at IS NOT NULL FROM recordings WHERE fiche_cache_id = 1 ORDER BY id") == [
        ("a", True), ("b", False)
    ]  # fmt: skip
    assert query(TRANSCRIBED) == before


@pytest.mark.req("G-82", "TRX-44")
async def test_whatever_is_fetched_what_was_transcribed_stays(connection, query):
    """Chance decides what the CRM says and what is transcribed in between."""
    chance = random.Random(7)  # noqa: S311 - the same cases every time
    calls = [f"c{n}" for n in range(5)]
    for _ in range(60):
        query(TRANSCRIBE, chance.sample(calls, 1))
        before = {row[:2]: row for row in query(TRANSCRIBED)}
        batch = []
        for fiche in chance.sample(["1", "2", "3"], 2):
            listed = [
                call(name, chance.choice(["", "https://x.test/1", "https://x.test/2"]))
                for name in chance.choices(calls, k=4)
            ]
            batch.append((fiche, chance.choice([None, details(*listed), details(*listed)])))
        await save(connection, *batch)
        after = {row[:2]: row for row in query(TRANSCRIBED)}
        assert {key: after[key] for key in before} == before
        assert not any(row[2] for key, row in after.items() if key not in before)


@pytest.mark.req("AUT-52", "ENG-95")
async def test_a_fiche_that_is_gone_is_marked_and_keeps_what_was_known(connection, query, one):
    await save(connection, ("1", details(call("a"), groupe="B")))
    await save(connection, ("1", None), ("2", None))
    marked = query("SELECT fiche_id, details_success, details_message, recordings_count FROM fiche_cache ORDER BY 1")
    assert marked == [("1", False, "NOT_FOUND", 1), ("2", False, "NOT_FOUND", None)]
    assert one("SELECT fiche_cache_id, groupe FROM fiche_cache_information") == (1, "B")
    assert query(RECORDINGS) == [("a", "https://calls.test/a.mp3", False)]
    await save(connection, ("1", details(call("a"), groupe="C")))
    assert one("SELECT details_success, details_message FROM fiche_cache WHERE fiche_id = '1'") == (True, "")
    assert one("SELECT groupe FROM fiche_cache_information") == "C"


async def test_a_recording_that_is_listed_twice_is_stored_once(connection, query):
    twice = details(call("a", ""), call("a", "https://x.test/1"), call("b", "https://x.test/2"))
    first, second, gone = await save(connection, ("1", details(call("old"))), ("1", twice), ("2", None))
    assert first == second != gone
    assert query(RECORDINGS) == [("a", "https://x.test/1", False), ("b", "https://x.test/2", False)]


@pytest.mark.req("G-32", "G-81", "ENG-106")
async def test_the_same_fiche_of_two_tenants_is_two_fiches(dsn, connection, query):
    query("INSERT INTO tenants (id, name, created_at) VALUES ('acme', 'Acme', ecluse_now())")
    mine, theirs = Fetched("default", "1", details(call("a"), call("b"))), Fetched("acme", "1", details(call("a")))
    ids = await save_details(connection, [mine, theirs])
    assert ids["default", "1"] != ids["acme", "1"]
    await save_details(connection, [Fetched("acme", "1", details())])
    assert query("SELECT call_id FROM recordings WHERE removed_at IS NULL ORDER BY 1") == [("a",), ("b",)]
    await save_details(connection, [Fetched("acme", "1", None)])
    assert query("SELECT tenant_id, details_success FROM fiche_cache ORDER BY 1") == [
        ("acme", False),
        ("default", True),
    ]


class Counting(psycopg.AsyncCursor):
    statements = 0

    async def execute(self, *arguments, **options):
        Counting.statements += 1
        return await super().execute(*arguments, **options)


async def test_hundreds_of_fiches_with_thousands_of_recordings_are_a_handful_of_statements(dsn, one):
    batch = [Fetched("default", str(n), details(*(call(f"c{k}") for k in range(5)))) for n in range(500)]
    async with await psycopg.AsyncConnection.connect(dsn, cursor_factory=Counting) as connection:
        before = Counting.statements
        first = await save_details(connection, batch)
        assert Counting.statements - before <= 5
        assert await save_details(connection, batch[::-1]) == first
    assert len(first) == 500
    assert one("SELECT count(*) FROM recordings WHERE removed_at IS NULL") == 2500


async def test_nothing_fetched_is_nothing_saved(connection):
    assert await save_details(connection, []) == {}


async def test_what_the_crm_repeats_is_not_written_again(connection, query):
    answer = details(call("a", start_time="2026-03-02T09:30:00Z", duration_s=2.5), call("b"))
    await save(connection, ("1", answer))
    before = query("SELECT ctid, updated_at FROM recordings ORDER BY id")
    await save(connection, ("1", answer))
    assert query("SELECT ctid, updated_at FROM recordings ORDER BY id") == before


async def test_batches_that_cross_each_other_do_not_block_each_other_for_good(dsn, one):
    """Two replicas, the same fiches in opposite order, recordings that come and go."""

    async def replica(seed: int) -> None:
        chance = random.Random(seed)  # noqa: S311 - the same cases every time
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            for _ in range(15):
                fiches = [str(n) for n in range(20)]
                chance.shuffle(fiches)
                calls = [call(f"c{n}", f"https://x.test/{chance.random()}") for n in range(6)]
                await save(connection, *((fiche, details(*chance.sample(calls, 3))) for fiche in fiches))

    await asyncio.gather(*(replica(seed) for seed in range(3)))
    wrong = "count(*) FILTER (WHERE n <> 3) FROM (SELECT count(*) AS n FROM recordings WHERE removed_at IS NULL"
    assert one(f"SELECT {wrong} GROUP BY fiche_cache_id) x") == 0
