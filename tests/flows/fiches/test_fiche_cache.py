"""The state of a fiche as SQL derives it, over a table of cases; the sales list in the cache."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta

import psycopg
import pytest

from ecluse.flows.fiches.cache import cache_sales, states
from tests.support.fiche_rows import call, details, save

DAY, NOW = date(2026, 3, 2), datetime(2026, 3, 3, 4, 5, tzinfo=UTC)
FULL = {"success": True, "information": {"groupe": "L", "attribution_user_id": "9"}, "recordings": [{}, {}]}
SALES = {"id": "1", "groupe": "S"}
# success, message, information row, raw_data: full, not found
DETAILS = {
    "only in the sales list": ((None, None, False, SALES), False, False),
    "nothing at all": ((None, None, False, None), False, False),
    "normalized": ((True, "", True, SALES), True, False),
    "as older versions kept it": ((None, None, False, FULL), True, False),
    "information that is none": ((None, None, False, {"information": None}), False, False),
    "information in words": ((None, None, False, {"information": "yes"}), False, False),
    "a list of them": ((None, None, False, [FULL]), False, False),
    "gone": ((False, "NOT_FOUND", False, SALES), False, True),
    "gone in small letters, among others": ((False, "crm: not_found (404)", False, None), False, True),
    "gone, once known": ((False, "Not_Found", True, None), True, True),
    "a success that names it": ((True, "NOT_FOUND", True, None), True, False),
    "nobody said whether": ((None, "NOT_FOUND", False, None), False, False),
    "failed for another reason": ((False, "internal error", False, None), False, False),
    "another spelling": ((False, "NOT FOUND", False, None), False, False),
    "failed without a word": ((False, None, False, None), False, False),
}
# recordings_count, has_recordings, raw_data: how many, any
TOLD = {
    "by both": ((3, True, None), (3, True)),
    "none": ((0, False, FULL), (0, False)),
    "by number": ((3, None, None), (3, True)),
    "by number, none": ((0, None, FULL), (0, False)),
    "by word": ((None, True, None), (None, True)),
    "by list": ((None, None, FULL), (2, True)),
    "by empty list": ((None, None, {"recordings": []}), (0, False)),
    "word before list": ((None, False, FULL), (2, False)),
    "by nothing": ((None, None, SALES), (None, None)),
    "by what is no list": ((None, None, {"recordings": "three"}), (None, None)),
    "by what is no object": ((None, None, [1]), (None, None)),
}
INSERT = """
INSERT INTO fiche_cache (tenant_id, fiche_id, details_success, details_message, recordings_count, has_recordings,
    raw_data, created_at, updated_at)
SELECT 'default', count(*)::text,  %s, %s, %s, %s, %s, ecluse_now(), ecluse_now() FROM fiche_cache RETURNING id
"""
INFORM = "INSERT INTO fiche_cache_information (fiche_cache_id, updated_at) VALUES (%s, ecluse_now())"


@pytest.fixture(scope="module")
def many(databases):
    """One database for the tables of cases: each case a fiche."""
    with databases.one() as dsn, psycopg.connect(dsn, autocommit=True) as connection:
        yield connection


def insert(connection, success=None, message=None, count=None, has=None, raw=None, information=False) -> int:
    stored = None if raw is None else json.dumps(raw)
    (number,) = connection.execute(INSERT, (success, message, count, has, stored)).fetchone()
    if information:
        connection.execute(INFORM, (number,))
    return number


@pytest.mark.req("AUT-51", "AUT-52", "AUT-98", "AUT-99", "AUT-203")
@pytest.mark.parametrize(("row", "full", "gone"), DETAILS.values(), ids=DETAILS)
def test_readiness_follows_from_the_row(many, row, full, gone):
    success, message, information, raw = row
    number = insert(many, success, message, raw=raw, information=information)
    word = "not_found" if gone else "ready" if full else "missing"
    asked = "SELECT details FROM fiche_states WHERE fiche_cache_id = %s"
    assert many.execute(asked, (number,)).fetchone() == (word,)


@pytest.mark.req("AUT-53")
@pytest.mark.parametrize(("row", "told"), TOLD.values(), ids=TOLD)
def test_the_number_of_recordings_follows_from_the_row(many, row, told):
    count, has, raw = row
    number = insert(many, count=count, has=has, raw=raw)
    asked = "SELECT recordings_count, has_recordings FROM fiche_states WHERE fiche_cache_id = %s"
    assert many.execute(asked, (number,)).fetchone() == told


@pytest.mark.req("AUT-54", "AUT-96", "ENG-95", "G-82")
async def test_gates_are_told_of_many_fiches_at_once(connection, query):
    await cache_sales(connection, "default", {DAY: [{"id": "3", "groupe": "S", "data": {}}]}, NOW)
    await save(connection, ("1", details(call("a"), call("b"), call("c"))), ("2", None))
    await save(connection, ("1", details(call("a"), call("b"))))
    query(
        "UPDATE recordings SET has_transcription = true, transcription_text = '', transcribed_at = ecluse_now()"
        " WHERE call_id IN ('a', 'c')"
    )
    found = await states(connection, "default", ["1", "2", "3", "4"])
    assert {key: (one.details, one.ready) for key, one in found.items()} == {
        "1": ("ready", True), "2": ("not_found", True), "3": ("missing", False)
    }  # fmt: skip
    assert (found["1"].total_recordings, found["1"].transcribed) == (2, 1), "those removed count nowhere"
    assert (found["1"].recordings_count, found["1"].has_recordings, found["1"].groupe) == (2, True, "A")
    assert (found["3"].recordings_count, found["3"].has_recordings, found["3"].groupe) == (None, None, "S")
    assert found["3"].fetched_at is None is not found["2"].fetched_at
    assert await states(connection, "acme", ["1"]) == {}


@pytest.mark.req("AUT-62")
async def test_a_day_of_the_sales_list_is_cached(connection, query):
    rows = [{"id": str(n), "groupe": None if n % 2 else "S", "data": {"id": n, "ville": "Lyon"}} for n in range(300)]
    await cache_sales(connection, "default", {DAY: [*rows, rows[0]]}, NOW)
    kept = query("SELECT fiche_id, groupe, sales_date, last_revalidated_at, raw_data FROM fiche_cache ORDER BY id")
    assert sorted(kept) == sorted((r["id"], r["groupe"], DAY, NOW, r["data"]) for r in rows)


@pytest.mark.req("AUT-62", "AUT-51")
async def test_a_later_sales_list_renews_a_fiche_and_takes_nothing_away(connection, query, one):
    await cache_sales(connection, "default", {DAY: [{"id": "1", "groupe": "S", "data": {"v": 1}}]}, NOW)
    await save(connection, ("1", details(call("a"))))
    later, next_day = NOW + timedelta(days=1), DAY + timedelta(days=1)
    await cache_sales(connection, "default", {next_day: [{"id": "1", "groupe": None, "data": {"v": 2}}]}, later)
    told = one("SELECT groupe, sales_date, last_revalidated_at, raw_data, recordings_count FROM fiche_cache")
    assert told == ("S", next_day, later, {"v": 2}, 1)
    query("UPDATE fiche_cache SET raw_data = %s", json.dumps(FULL))
    query("DELETE FROM fiche_cache_information")
    await cache_sales(connection, "default", {DAY: [{"id": "1", "groupe": "T", "data": {"v": 3}}]}, NOW)
    assert one("SELECT groupe, raw_data FROM fiche_cache") == ("T", FULL)
    assert (await states(connection, "default", ["1"]))["1"].ready


async def test_an_empty_day_is_no_mistake(connection, one):
    await cache_sales(connection, "default", {DAY: []}, NOW)
    assert one("SELECT count(*) FROM fiche_cache") == 0
