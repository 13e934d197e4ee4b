"""From the CRM's answer on the wire to the tables: what is found, what is gone, and what no CRM should send."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime

import pytest

from ecluse.base.errors import PermanentError, TransientError
from ecluse.flows.fiches.cache import cache_sales, states
from ecluse.flows.fiches.fetch import fetch_fiche
from ecluse.vendors.crm import Crm
from tests.support.fiche_rows import save
from tests.support.raw_server import answers, client_of, raw_server, response

INFORMATION = {"groupe": "A", "attribution_user_id": 7, "ville": "Lyon"}
CALL = {
    "call_id": "c1",
    "recording_url": "https://x.test/1",
    "start_time": "2026-03-02T09:30:00+01:00",
    "duration_s": 61,
}
FICHE = {"success": True, "message": "", "information": INFORMATION, "recordings": [CALL]}
GONE = {"success": False, "message": "NOT_FOUND"}


@asynccontextmanager
async def crm_that_answers(*bodies, status=200):
    """A CRM that gives these answers, in this order, and the requests that it got."""
    responses = [response(json.dumps(one).encode(), status=status) for one in bodies]
    async with raw_server(answers(*responses)) as server, client_of(server.port, deadline=30) as http:
        yield Crm(http, "general-key"), server.requests


@pytest.mark.req("AUT-20", "ENG-11", "G-90")
async def test_a_fiche_is_fetched_every_time_and_stored_as_the_crm_sent_it(connection, query, one):
    renewed = {**FICHE, "information": {**INFORMATION, "groupe": "B"}}
    async with crm_that_answers(FICHE, renewed) as (crm, requests):
        fetched = await fetch_fiche(crm, "171")
        assert json.loads(json.dumps(fetched)) == fetched
        await save(connection, ("171", fetched["details"]))
        again = await fetch_fiche(crm, "171")
    assert (fetched["found"], again["found"]) == (True, True)
    await save(connection, ("171", again["details"]))
    assert [head.split("\r\n")[0] for head in requests] == ["GET /fiches/171 HTTP/1.1"] * 2
    assert all("general-key" in request for request in requests)
    assert one("SELECT groupe, attribution_user_id, data ->> 'ville' FROM fiche_cache_information") == (
        "B",
        "7",
        "Lyon",
    )
    assert query("SELECT call_id, recording_url, start_time, duration_s FROM recordings") == [
        ("c1", "https://x.test/1", datetime(2026, 3, 2, 8, 30, tzinfo=UTC), 61.0)
    ]


@pytest.mark.req("ENG-11", "AUT-52", "AUT-98", "G-90")
@pytest.mark.parametrize("status", [404, 200])
async def test_a_fiche_that_the_crm_does_not_know_is_an_answer(connection, status):
    async with crm_that_answers(GONE, status=status) as (crm, _):
        fetched = await fetch_fiche(crm, "171")
    assert fetched == {"found": False}
    await save(connection, ("171", None))
    state = (await states(connection, "default", ["171"]))["171"]
    assert (state.details, state.ready) == ("not_found", True)


@pytest.mark.parametrize(("status", "error"), [(401, PermanentError), (400, PermanentError), (503, TransientError)])
async def test_what_is_no_answer_is_an_error(status, error):
    async with crm_that_answers({}, status=status) as (crm, _):
        with pytest.raises(error):
            await fetch_fiche(crm, "171")


@pytest.mark.req("TRX-43")
async def test_whatever_the_crm_puts_into_its_texts_can_be_stored(connection, query, one):
    hostile = {
        "success": True,
        "message": "a \x00 in it",
        "information": {"groupe": "A\x00", "attribution_user_id": "7", "note\x00": ["\x00", {"deep": "\x00"}]},
        "recordings": [
            {"call_id": "a\x00b", "recording_url": " \t "},
            {"call_id": "twice", "recording_url": "https://x.test/1"},
            {"call_id": "twice", "recording_url": None},
            {"call_id": "x" * 100_000, "recording_url": "https://x.test/2"},
            {"call_id": "'; DROP TABLE recordings; --", "recording_url": "https://x.test/" + "y" * 20_000},
            "not even an object",
        ],
    }
    async with crm_that_answers(hostile) as (crm, _):
        fetched = await fetch_fiche(crm, "171")
    await save(connection, ("171", fetched["details"]))
    kept = dict(query("SELECT call_id, length(recording_url) FROM recordings"))
    assert kept == {"a\ufffdb": 0, "twice": 16, "'; DROP TABLE recordings; --": 20_015}
    assert one("SELECT groupe FROM fiche_cache_information") == "A\ufffd"


@pytest.mark.req("AUT-62", "G-90")
async def test_a_sales_list_goes_into_the_cache_as_the_crm_sent_it(connection, query):
    rows = [
        {"id": 1, "groupe": "A", "ville": "Lyon\x00"},
        {"id": "2"},
        {"groupe": "without an id"},
        {"id": 1, "groupe": "B"},
    ]
    async with crm_that_answers({"fiches": rows}) as (crm, requests):
        sales = await crm.sales(date(2026, 3, 2))
    listed = [fiche.model_dump(mode="json") for fiche in sales.fiches]
    await cache_sales(connection, "default", {date(2026, 3, 2): listed}, datetime(2026, 3, 3, tzinfo=UTC))
    assert query("SELECT fiche_id, groupe, raw_data ->> 'ville', sales_date FROM fiche_cache ORDER BY 1") == [
        ("1", "A", "Lyon\ufffd", date(2026, 3, 2)),
        ("2", None, None, date(2026, 3, 2)),
    ]
    assert len(sales.skipped) == 1
    assert "date=02/03/2026" in requests[0].replace("%2F", "/")
