"""Pages of company enrichment: requests, the card of a company, the registers; the form that refreshes it."""

from __future__ import annotations

import re
from urllib.parse import urlencode

import pytest

from ecluse.vendors.registers import Source
from ecluse.web.companies import failure, reasons
from tests.support.api_server import new_key, serving
from tests.support.pages import Reader, text
from tests.support.registers import ONLY_SEARCH, OPPOSED, PLACES, SNCF, UNKNOWN
from tests.support.waits import wait_for
from tests.web.conftest import aside, unreadable

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def operator(pages_dsn, sandbox_server, reader):  # the reader first: no server is started beside a browser
    """A reader of a server that works, with the sandbox as the registers."""
    url = sandbox_server.url
    knobs = {
        "RECHERCHE_ENTREPRISES_BASE_URL": url + PLACES[Source.SEARCH],
        "INPI_BASE_URL": url + PLACES[Source.INPI],
        "INPI_USERNAME": "user@example.org",
        "INPI_PASSWORD": "a-good-password",
        "ENRICHMENT_SYNC_WAIT_MS": 20_000,
    }
    with serving(pages_dsn, roles=frozenset({"api", "worker"}), **knobs) as client:
        yield Reader(client, new_key(pages_dsn))


@pytest.fixture(scope="module")
def asked(operator):
    """The ids of requests, by SIREN."""
    api = operator.client.with_key(operator.key)
    return {
        siren: api.post("/v1/requests", {"company_siren": siren}).json["id"]
        for siren in (SNCF, ONLY_SEARCH, OPPOSED, UNKNOWN)
    }


def test_a_run_of_the_engine_names_its_company(operator, asked, fill):
    run = fill("SELECT run_id FROM enrichment_jobs WHERE siren = %s", SNCF)
    body = operator.get(f"/ui/runs/{run}").body.decode()
    assert f'<a href="/ui/requests?siren={SNCF}">company {SNCF}</a>' in body


def test_requests_are_found_by_name_siren_and_status(operator, asked):
    everything = operator.shown("/ui/requests")
    assert f"SOCIETE NATIONALE SNCF SUCCESS {SNCF}" in everything
    assert f"not known FAILED {UNKNOWN} API_RECHERCHE_ENTREPRISES:200:NOT_FOUND" in everything
    for wanted in ("q=nationale", f"q={SNCF[:5]}", f"siren={SNCF}", "status=SUCCESS&q=SNCF"):
        found = operator.shown(f"/ui/requests?{wanted}")
        assert SNCF in found
        assert UNKNOWN not in found
    assert "No matching requests" in operator.shown("/ui/requests?q=nothing-like-it")
    body = operator.get("/ui/requests").body.decode()
    assert '<a href="/ui/requests" aria-current="page">Companies</a>' in body
    assert operator.get("/ui/requests/999999").status == 404


def test_a_card_has_value_source_and_date_of_each_field_and_its_history(operator, asked):
    shown = operator.shown(f"/ui/requests/{asked[SNCF]}")
    assert "All registers that were asked have answered." in shown
    assert re.search(r"Identity .*Legal name SOCIETE NATIONALE SNCF API_RECHERCHE_ENTREPRISES 20\d\d-", shown)
    assert re.search(r"Legal details .*Capital amount [\d,]+\.00 INPI_RNE 20\d\d-", shown)
    columns = "Siret Address Postal code City Head office State Activity code Creation date"
    assert re.search(rf"Establishments API_RECHERCHE_ENTREPRISES, 20\d\d-\S* \S* ?.*{columns}", shown)
    assert re.search(r"Directors INPI_RNE, 20\d\d-", shown)
    assert "SUCCESS REQUEST_CREATED 1" in shown
    assert "the first one" in shown
    partial = operator.shown(f"/ui/requests/{asked[ONLY_SEARCH]}")
    assert "INPI_RNE the register does not have this company NOT_FOUND , HTTP 404" in partial
    unknown = operator.shown(f"/ui/requests/{asked[UNKNOWN]}")
    assert "API_RECHERCHE_ENTREPRISES, which is required, does not have this company." in unknown
    assert "No data are stored" in unknown
    assert re.search(r"not asked for again before 20\d\d-\S+ \S+Z, when it is read", unknown)
    assert f"ecluse requests refresh {asked[UNKNOWN]} asks at once" in unknown


@pytest.mark.req("ENR-38", "ENR-72")
@pytest.mark.parametrize(
    ("error", "says"),
    [
        ("API_RECHERCHE_ENTREPRISES:503:TIMEOUT", "which is required, could not be asked"),
        ("API_RECHERCHE_ENTREPRISES:200:CORE_IDENTITY_MISSING|INPI_RNE:404:NOT_FOUND", "none gave the legal name"),
        ("INPI_RNE:-:UNKNOWN", "ended before"),
    ],
)
def test_a_failed_job_is_described_by_the_error_of_the_required_register(error, says):
    assert says in failure(error)


@pytest.mark.req("G-55")
def test_an_answer_503_is_not_called_a_timeout():
    assert [one["says"] for one in reasons("INPI_RNE:503:TIMEOUT|API_ENTREPRISE_RCS:-:TIMEOUT")] == [
        "the register is unavailable",
        "request timed out",
    ]


def test_directors_of_a_company_opposed_to_diffusion_are_masked_on_its_page(operator, asked):
    shown = operator.shown(f"/ui/requests/{asked[OPPOSED]}")
    directors = shown.split("Directors")[1].split("Jobs")[0]
    assert "Masked" in directors
    assert "Last name" not in directors


def test_a_job_of_another_tenant_is_shown_without_its_run(operator, asked, pages_dsn):
    rival = operator.with_key(aside(new_key, pages_dsn, tenant="rival"))
    made = operator.client.with_key(rival.key).post("/v1/requests", {"company_siren": SNCF}).json
    assert made["cached"]
    shown = rival.shown(f"/ui/requests/{made['id']}")
    assert "of another tenant SUCCESS" in shown
    assert rival.get(f"/ui/requests/{asked[SNCF]}").status == 404


def test_the_form_asks_the_registers_again(operator, reader, asked, fill):
    page = f"/ui/requests/{asked[SNCF]}"
    assert "Refresh" in operator.shown(page)
    assert "Refresh" not in reader.shown(page), "a viewer may not"
    before = fill("SELECT count(*) FROM enrichment_jobs WHERE siren = %s", SNCF)
    form = operator.get(f"/ui/do/refresh_company/{asked[SNCF]}?back={page}")
    assert f"The registers are asked again for the company of request {asked[SNCF]}." in text(form)
    hidden = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', form.body.decode()))
    done = operator.post(f"/ui/do/refresh_company/{asked[SNCF]}", urlencode(hidden))
    assert (done.status, done.headers["Location"]) == (303, page)
    ended = "SELECT count(*) FROM enrichment_jobs WHERE siren = %s AND ended_at IS NOT NULL"
    wait_for(lambda: fill(ended, SNCF) == before + 1)
    shown = operator.shown(page)
    assert "SUCCESS MANUAL_REFRESH 1" in shown
    assert " nothing " in shown.split("Snapshots")[1], "the registers say the same"


def test_a_card_says_what_its_job_waits_for(operator, asked, pages_dsn):
    api, page = operator.client.with_key(aside(new_key, pages_dsn, "admin")), f"/ui/requests/{asked[OPPOSED]}"
    assert api.post("/api/lanes/inpi-rne/pause", {"reason": "INPI is being moved"}).status == 200
    assert api.post(f"/v1/requests/{asked[OPPOSED]}:refresh-company", {}).status == 202
    why = "1 waiting, 0 in flight: lane inpi-rne was paused by an operator: INPI is being moved"
    wait_for(lambda: why in operator.shown(page))
    told = api.get(f"/v1/requests/{asked[OPPOSED]}").json
    assert told["waiting"].startswith(why)
    assert told["waiting"].endswith(f" (`ecluse runs why {told['job_id']}`)")
    assert "Sources answered" not in operator.shown(page), "the counts are those of the job before"
    assert api.post("/api/lanes/inpi-rne/resume", {"reason": "it is over"}).status == 200
    wait_for(lambda: "Sources answered 2" in operator.shown(page))
    assert " waiting, " not in operator.shown(page)


def test_opening_a_request_whose_data_are_too_old_starts_a_job(operator, asked, fill):
    fill("UPDATE companies SET updated_at = updated_at - interval '31 days' WHERE siren = %s", ONLY_SEARCH)
    operator.shown(f"/ui/requests/{asked[ONLY_SEARCH]}")
    job = "SELECT count(*) FROM enrichment_jobs WHERE siren = %s AND trigger = 'REQUEST_OPENED'"
    assert fill(job, ONLY_SEARCH) == 1


def test_sources_show_what_is_configured_their_pace_and_their_errors(operator, asked):
    shown = operator.shown("/ui/requests/sources")
    assert re.search(r"API_RECHERCHE_ENTREPRISES required, \S+ configured 7 per second", shown)
    assert re.search(r"INPI_RNE optional, \S+ configured none", shown)
    assert "off set API_ENTREPRISE_TOKEN" in shown
    assert re.search(r"INPI_RNE .* NOT_FOUND [2-9]", shown)


def test_the_pages_are_accessible_on_any_screen(operator, visit, asked, pages_dsn):
    visitor = visit(operator.client, reduced_motion="reduce")
    page = visitor.log_in(aside(new_key, pages_dsn))
    found = []
    cards = [f"/ui/requests/{asked[siren]}" for siren in (SNCF, UNKNOWN)]
    for path in ["/ui/requests", *cards, "/ui/requests/sources", "/ui/do/create_request"]:
        visitor.go(path)
        found += unreadable(page)
    assert not found, "\n".join(found)


def test_the_sources_fit_a_small_laptop(operator, visit, asked):
    page = visit(operator.client, viewport={"width": 1024, "height": 768}).enter(operator.key, "/ui/requests/sources")
    assert page.get_by_text("per second").count()
    wide, room = page.locator(".overflow-auto").evaluate("one => [one.scrollWidth, one.clientWidth]")
    assert wide <= room
