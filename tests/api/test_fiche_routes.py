"""Fiches over HTTP: what is listed and shown, to whom, and what nobody is shown."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, date, datetime

import psycopg
import pytest

from ecluse.flows.fiches.cache import cache_sales
from ecluse.flows.fiches.surface import FICHES, FicheInFull
from tests.api.narrow import narrow
from tests.support.api_server import add_tenant, new_key
from tests.support.fiche_rows import call, details, save

NOW = datetime(2026, 3, 9, tzinfo=UTC)
SIGNED = "https://calls.test/1.mp3?part=1&X-Amz-Signature=abcdef0123&Expires=99"
TRANSCRIBE = """
UPDATE recordings SET has_transcription = true, transcription_text = 'said', transcribed_at = ecluse_now()
WHERE call_id = 'late'
"""


@pytest.fixture(scope="module")
def fiches(shared_dsn):
    """Of `default`: 10 and 11 in full, 12 gone, 20 only listed, 30 as older versions kept it; of `acme` another 10."""
    add_tenant(shared_dsn, "acme")
    recordings = [
        call("never", " \t"),
        call("late", SIGNED, start_time="2026-03-02T10:00:00Z", duration_s=61.5),
        call("early", start_time="2026-03-02T09:00:00Z"),
    ]

    async def fill() -> None:
        async with await psycopg.AsyncConnection.connect(shared_dsn, autocommit=True) as c:
            for day, fiche in ((2, "10"), (3, "11"), (4, "20")):
                await cache_sales(c, "default", {date(2026, 3, day): [{"id": fiche, "groupe": "B", "data": {}}]}, NOW)
            told = details(*recordings, call("gone"), groupe="A", user="7", lien=SIGNED, api_key="hush")
            await save(c, ("10", told), ("11", details(groupe="B", user="8")), ("12", None))
            await save(c, ("10", {**told, "recordings": recordings}))
            await save(c, ("10", details(groupe="Z", user="99")), tenant="acme")
            await c.execute(TRANSCRIBE)
            legacy = {"information": {"groupe": "L", "attribution_user_id": 9, "ville": "Nice"}, "recordings": [{}]}
            await cache_sales(c, "default", {date(2026, 3, 1): [{"id": "30", "groupe": None, "data": legacy}]}, NOW)

    asyncio.run(fill())


def listed(client, query=""):
    return [row["fiche_id"] for row in client.get(f"/api/fiches{query}").json["fiches"]]


@pytest.mark.req("AUT-54", "TRX-41", "G-34")
def test_fiches_are_listed_with_the_latest_sales_first_and_their_counts(shared_api, fiches):
    page = FICHES.page.model_validate(shared_api.get("/api/fiches").json)
    told = [(one.fiche_id, one.details, one.groupe, one.total_recordings, one.transcribed) for one in page.fiches]
    assert told == [
        ("20", "missing", "B", 0, 0),
        ("11", "ready", "B", 0, 0),
        ("10", "ready", "A", 3, 1),
        ("30", "ready", "L", 0, 0),
        ("12", "not_found", None, 0, 0),
    ]
    assert [one.has_recordings for one in page.fiches] == [None, False, True, True, None]
    assert (page.limit, page.offset) == (50, 0)
    assert {one.tenant_id for one in page.fiches} == {"default"}
    assert listed(shared_api, "?limit=2&offset=1") == ["11", "10"]


FILTERS = {
    "groupe=B": ["20", "11"],
    "groupe=b": [],
    "sales_from=2026-03-03": ["20", "11"],
    "sales_to=2026-03-02": ["10", "30"],
    "sales_from=2026-03-02&sales_to=2026-03-03": ["11", "10"],
    "details=ready": ["11", "10", "30"],
    "details=not_found": ["12"],
    "details=missing": ["20"],
    "has_recordings=true": ["10", "30"],
    "has_recordings=false": ["11"],
    "q=1": ["11", "10", "12"],
    "q=10": ["10"],
    "q=0": [],
    "q=1&groupe=A&details=ready&has_recordings=true": ["10"],
}
SENSELESS = [
    *("limit=0", "limit=201", "offset=-1", "details=gone", "has_recordings=perhaps"),
    *("q=", "q=" + 201 * "1", "groupe=%00", "groupe=" + 201 * "x"),
    *("sales_from=yesterday", "sales_from=1772409600", "sales_to=2026-02-30", "sales_to="),
]


@pytest.mark.parametrize(("query", "wanted"), FILTERS.items(), ids=FILTERS)
def test_a_list_is_filtered(shared_api, fiches, query, wanted):
    assert listed(shared_api, f"?{query}") == wanted


@pytest.mark.req("G-34")
@pytest.mark.parametrize("query", SENSELESS)
def test_a_filter_that_makes_no_sense_is_refused(shared_api, fiches, query):
    answer = shared_api.get(f"/api/fiches?{query}")
    assert (answer.status, answer.code) == (422, "INVALID_INPUT")


@pytest.mark.req("TRX-94", "TRX-43", "TRX-44", "G-82", "G-81")
def test_a_fiche_is_shown_in_full_with_its_recordings_by_start_time(shared_api, fiches):
    answer = shared_api.get("/api/fiches/10")
    fiche = FicheInFull.model_validate(answer.json)
    assert (fiche.fiche_id, fiche.groupe, fiche.attribution_user_id, fiche.details) == ("10", "A", "7", "ready")
    assert (fiche.recordings_count, fiche.total_recordings, fiche.transcribed) == (3, 3, 1)
    told = [(r.call_id, r.url_missing, r.has_transcription, r.removed_at is not None) for r in fiche.recordings]
    assert told == [
        ("early", False, False, False),
        ("late", False, True, False),
        ("gone", False, False, True),
        ("never", True, False, False),
    ]
    assert isinstance(answer.json["fiche_cache_id"], str)
    assert all(isinstance(one["id"], str) for one in answer.json["recordings"])


@pytest.mark.req("G-33")
def test_what_signs_a_url_is_not_shown(shared_api, fiches):
    answer = shared_api.get("/api/fiches/10")
    assert b"abcdef0123" not in answer.body
    assert b"hush" not in answer.body
    late = next(one for one in answer.json["recordings"] if one["call_id"] == "late")
    assert late["recording_url"].startswith("https://calls.test/1.mp3?part=1&X-Amz-Signature=***")
    assert answer.json["information"]["lien"] == late["recording_url"]


@pytest.mark.req("AUT-51")
def test_a_fiche_as_older_versions_kept_it_is_shown_too(shared_api, fiches):
    fiche = FicheInFull.model_validate(shared_api.get("/api/fiches/30").json)
    assert (fiche.groupe, fiche.attribution_user_id, fiche.recordings_count) == ("L", "9", 1)
    assert fiche.information["ville"] == "Nice"


@pytest.mark.req("G-81")
@pytest.mark.parametrize(
    "path", ["4711", "abc", "10a", "-10", "%00", "10%0A", "%2010", "1" * 201, "%EF%BC%91%EF%BC%90", "10/x"]
)
def test_what_is_no_fiche_of_the_cache_is_not_found(shared_api, fiches, path):
    answer = shared_api.get(f"/api/fiches/{path}")
    assert (answer.status, answer.code) == (404, "NOT_FOUND")


@pytest.mark.req("G-32", "ENG-106")
def test_the_same_number_is_another_tenants_other_fiche(shared_api, shared_dsn, fiches):
    acme = shared_api.with_key(new_key(shared_dsn, "admin", "acme"))
    assert listed(acme) == ["10"]
    assert acme.get("/api/fiches/10").json["groupe"] == "Z"
    assert (acme.get("/api/fiches/11").status, acme.get("/api/fiches/11").code) == (404, "NOT_FOUND")


@pytest.mark.req("TRX-21", "TRX-20", "G-33")
@pytest.mark.parametrize(
    ("scope", "seen"),
    [
        (("GROUP", ["A", "L"]), ["10", "30"]),
        (("GROUP", ["B"]), ["20", "11"]),
        (("GROUP", []), []),
        (("SELF", [], "7"), ["10"]),
        (("SELF", ["A"], "9"), ["30"]),
    ],
    ids=str,
)
def test_a_narrow_scope_sees_its_own_and_learns_nothing_of_the_others(shared_api, shared_dsn, fiches, scope, seen):
    client = narrow(shared_api, shared_dsn, *scope)
    assert listed(client) == seen
    refusals = set()
    for fiche in ("10", "11", "12", "20", "30", "4711"):
        answer = client.get(f"/api/fiches/{fiche}")
        assert answer.status == (200 if fiche in seen else 403)
        if fiche not in seen:
            refusals.add(answer.json["error"]["message"].replace(fiche, "…"))
            assert answer.code == "SCOPE"
    assert len(refusals) == 1, "the same words whether it exists or not"


def test_the_document_shows_what_a_fiche_looks_like(shared_api):
    document = shared_api.with_key(None).get("/openapi.json").json
    assert document["components"]["schemas"]["FicheRow"]["properties"]["fiche_id"]["examples"] == ["171234"]
    shown = json.dumps(document["paths"]["/api/fiches/{fiche_id}"]["get"])
    assert "#/components/schemas/FicheInFull" in shown
