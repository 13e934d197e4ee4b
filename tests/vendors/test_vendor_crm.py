"""The CRM's adapter against the sandbox and against answers of every untidiness."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime
from typing import Any

import pytest

from ecluse.base.errors import PermanentError, TransientError, VendorError
from ecluse.testing.sandbox import SandboxProcess
from ecluse.vendors.crm import Crm, FicheDetails, Sales
from ecluse.vendors.http import VendorHttp
from ecluse.vendors.names import Names
from tests.support.raw_server import NOW, answers, client_of, raw_server, response

DAY = date(2026, 3, 5)


@pytest.fixture
async def crm_http(sandbox: SandboxProcess) -> AsyncIterator[VendorHttp]:
    http = VendorHttp("crm", f"{sandbox.url}/crm", deadline=30, now=lambda: NOW)
    yield http
    await http.close()


@pytest.fixture
def crm(crm_http: VendorHttp) -> Crm:
    return Crm(crm_http, "general")


async def fiche_from(answer: Any, status: int = 200) -> FicheDetails:
    body = response(json.dumps(answer).encode(), status=status)
    async with raw_server(answers(body)) as server, client_of(server.port, deadline=30) as http:
        return await Crm(http, "k").fiche("1001")


async def sales_from(rows: Any) -> Sales:
    body = response(json.dumps({"fiches": rows}).encode())
    async with raw_server(answers(body)) as server, client_of(server.port, deadline=30) as http:
        return await Crm(http, "k").sales(DAY)


async def error_of(call: Any) -> VendorError:
    with pytest.raises(VendorError) as caught:
        await call
    return caught.value


@pytest.mark.req("G-90")
async def test_the_fiches_of_a_day_are_asked_for_as_the_contract_says(crm: Crm, sandbox: SandboxProcess) -> None:
    sales = await crm.sales(DAY)
    assert 20 <= len(sales.fiches) <= 40
    assert sales.skipped == []
    assert {fiche.groupe for fiche in sales.fiches} == {"Paris", "Lyon", "Marseille", "Lille", None}
    assert sales.fiches[0].data["statut"] == "vendu"
    [call] = sandbox.ledger(vendor="crm")
    assert (call["method"], call["path"]) == ("GET", "/crm/sales?date=05/03/2026")


@pytest.mark.req("G-90")
async def test_a_fiche_has_its_information_and_its_recordings(crm: Crm, sandbox: SandboxProcess) -> None:
    fiche = await crm.fiche("1002")
    assert (fiche.groupe, fiche.attribution_user_id, fiche.message) == ("Marseille", "102", "OK")
    assert fiche.information["ville"] == "Besançon"
    assert fiche.information["groupe"] == "Marseille"
    assert [recording.call_id for recording in fiche.recordings] == ["1002-1", "1002-2", "1002-3"]
    first = fiche.recordings[0]
    assert first.recording_url.startswith(f"{sandbox.url}/audio/recordings/1002-1.mp3?Expires=")
    assert first.start_time is not None
    assert first.start_time.tzinfo is not None
    assert first.duration_s is not None
    assert sandbox.ledger(vendor="crm")[0]["path"] == "/crm/fiches/1002"


@pytest.mark.req("G-90")
async def test_a_key_without_rights_is_refused(crm_http: VendorHttp) -> None:
    assert (await error_of(Crm(crm_http, "forbidden").fiche("1001"))).code == "FORBIDDEN"


@pytest.mark.req("G-90")
@pytest.mark.parametrize("fiche_id", ["9300", "9301", "12", "no such", "a/b", ".", ".."])
async def test_an_unknown_fiche_is_recognised_by_its_code(crm: Crm, fiche_id: str) -> None:
    error = await error_of(crm.fiche(fiche_id))
    assert (type(error), error.code) == (PermanentError, "NOT_FOUND")


async def test_recordings_without_a_url_have_a_blank_one(crm: Crm) -> None:
    for fiche_id in ("9200", "9201"):
        urls = [recording.recording_url for recording in (await crm.fiche(fiche_id)).recordings]
        assert [bool(url) for url in urls] == [True, False, True]
        assert urls[1] == ""


async def test_untidy_recordings_are_read_as_far_as_they_go(crm: Crm) -> None:
    fiche = await crm.fiche("9500")
    assert [recording.call_id for recording in fiche.recordings] == ["95001", "9500-2", "9500-3"]
    assert fiche.recordings[1].recording_url == ""
    assert fiche.recordings[2].start_time is None
    assert fiche.skipped == ["recording 4: call_id: Field required"]


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"start_time": "2026-03-05T10:00:00Z"}, {"start_time": datetime(2026, 3, 5, 10, tzinfo=UTC)}),
        ({"start_time": "2026-03-05T10:00:00+01:00"}, {"start_time": datetime(2026, 3, 5, 9, tzinfo=UTC)}),
        ({"start_time": "2026-03-05 10:00:00"}, {"start_time": datetime(2026, 3, 5, 10, tzinfo=UTC)}),
        ({"start_time": None}, {"start_time": None}),
        ({"start_time": "05/03/2026"}, {"start_time": None}),
        ({"start_time": 1741168800}, {"start_time": None}),
        ({"start_time": "0001-01-01T00:00:00+01:00"}, {"start_time": None}),
        ({"recording_url": "  "}, {"recording_url": ""}),
        ({"recording_url": " https://x.example/a "}, {"recording_url": "https://x.example/a"}),
        ({"recording_url": 7}, {"recording_url": ""}),
        ({"duration_s": 12}, {"duration_s": 12.0}),
        ({"duration_s": "long"}, {"duration_s": None}),
        ({"duration_s": -1}, {"duration_s": None}),
        ({"duration_s": 10**400}, {"duration_s": None}),
        ({"call_id": 7}, {"call_id": "7"}),
        ({"call_id": " c\x001 "}, {"call_id": "c\N{REPLACEMENT CHARACTER}1"}),
    ],
)
async def test_each_field_of_a_recording(given: dict[str, Any], read: dict[str, Any]) -> None:
    fiche = await fiche_from(
        {"success": True, "message": None, "information": {}, "recordings": [{"call_id": "c1", **given}]}
    )
    [recording] = fiche.recordings
    assert recording.model_dump().items() >= read.items()
    assert (fiche.groupe, fiche.attribution_user_id, fiche.message) == (None, None, "")


async def test_a_call_that_is_there_twice_is_one_recording_with_a_url() -> None:
    rows = [{"call_id": "1"}, {"call_id": 1, "recording_url": "u"}, {"call_id": "1", "recording_url": "v"}]
    fiche = await fiche_from({"success": True, "information": {}, "recordings": rows})
    assert [(one.call_id, one.recording_url) for one in fiche.recordings] == [("1", "u")]


async def test_what_cannot_be_stored_is_replaced_in_all_of_the_information() -> None:
    information = {"groupe": "\x00", "deep": [{"a\x00": "b\x00c"}], "n": 1, "t": True, "none": None}
    fiche = await fiche_from({"success": True, "information": information, "recordings": None})
    mark = "\N{REPLACEMENT CHARACTER}"
    assert fiche.information == {**information, "groupe": mark, "deep": [{f"a{mark}": f"b{mark}c"}]}
    assert (fiche.groupe, fiche.recordings) == (mark, [])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, "id: Field required"),
        ({"id": None}, "id: This should be a text"),
        ({"id": " "}, "id: This may not be empty"),
        ({"id": True}, "id: This should be a text"),
        ({"id": 1.5}, "id: This should be a text"),
        ({"id": "1", "groupe": ["Paris"]}, "groupe: This should be a text"),
        ("1001", "it: This should be an object"),
        (None, "it: This should be an object"),
    ],
)
async def test_a_broken_sales_row_is_reported_and_the_others_are_kept(row: Any, said: str) -> None:
    sales = await sales_from([{"id": 1001, "groupe": "Lyon"}, row, {"id": "1002", "groupe": ""}, {"id": "1003"}])
    assert [(fiche.id, fiche.groupe) for fiche in sales.fiches] == [("1001", "Lyon"), ("1002", None), ("1003", None)]
    [skipped] = sales.skipped
    assert skipped.startswith(f"sales row 2: {said}")


async def test_a_long_name_of_a_groupe_is_cut() -> None:
    rows = [{"id": "1", "groupe": "g" * 201}, {"id": "2", "groupe": "g" * 200}, {"id": "3", "groupe": ""}]
    cut = "g" * 199 + "…"
    assert [fiche.groupe for fiche in (await sales_from(rows)).fiches] == [cut, "g" * 200, None]
    assert (await fiche_from({"success": True, "information": {"groupe": "g" * 201}, "recordings": []})).groupe == cut


async def test_a_row_without_an_id_at_the_sandbox_is_reported(crm: Crm) -> None:
    sales = await crm.sales(date(2026, 3, 13))
    assert sales.skipped == [f"sales row {len(sales.fiches) + 1}: id: Field required"]


async def test_a_fiche_that_is_listed_twice_is_one() -> None:
    sales = await sales_from([{"id": 1, "groupe": "A"}, {"id": "2"}, {"id": "1", "groupe": "B"}])
    assert [(fiche.id, fiche.groupe) for fiche in sales.fiches] == [("1", "A"), ("2", None)]


@pytest.mark.parametrize(
    "answer",
    [
        {"success": True, "information": {}},
        {"success": True, "recordings": []},
        {"success": True, "information": [], "recordings": []},
        {"success": True, "information": {"groupe": {}}, "recordings": []},
        {"success": "yes", "information": {}, "recordings": []},
        {"information": {}, "recordings": []},
    ],
)
async def test_an_answer_that_lost_something_may_be_asked_for_again(answer: dict[str, Any]) -> None:
    error = await error_of(fiche_from(answer))
    assert (type(error), error.code) == (TransientError, "BAD_ANSWER")


async def test_a_failure_within_a_success_may_be_over_next_time() -> None:
    error = await error_of(fiche_from({"success": False, "message": "base indisponible"}))
    assert (type(error), error.code) == (TransientError, "CRM_UNSUCCESSFUL")
    assert "base indisponible" in error.message


@pytest.mark.parametrize(
    ("rule", "family", "code", "status"),
    [
        ({"kind": "unauthorized"}, PermanentError, "UNAUTHORIZED", 401),
        ({"kind": "refused", "status": 403, "code": "forbidden"}, PermanentError, "FORBIDDEN", 403),
        ({"kind": "throttle", "retry_after": 7}, TransientError, "THROTTLED", 429),
        ({"kind": "server_error", "status": 408}, TransientError, "VENDOR_ERROR_408", 408),
        ({"kind": "server_error", "status": 500}, TransientError, "VENDOR_ERROR_500", 500),
        ({"kind": "server_error", "status": 503}, TransientError, "VENDOR_ERROR_503", 503),
        ({"kind": "reset"}, TransientError, "VENDOR_DISCONNECTED", None),
        ({"kind": "wrong_shape"}, TransientError, "BAD_ANSWER", None),
    ],
)
@pytest.mark.parametrize("listing", [True, False])
async def test_each_fault_is_one_error_after_one_call(
    crm: Crm,
    sandbox: SandboxProcess,
    rule: dict[str, Any],
    family: type[VendorError],
    code: str,
    status: int | None,
    listing: bool,
) -> None:
    sandbox.set_faults([rule])
    error = await error_of(crm.sales(DAY) if listing else crm.fiche("1001"))
    assert (type(error), error.code, error.status) == (family, code, status)
    assert len(sandbox.ledger(kind="call")) == 1
    if status in (401, 403):
        assert "does not accept CRM_API_KEY" in error.message


async def test_silence_is_a_time_out(sandbox: SandboxProcess) -> None:
    sandbox.set_faults([{"kind": "timeout", "seconds": 60}])
    http = VendorHttp("crm", f"{sandbox.url}/crm", deadline=1, now=lambda: NOW)
    error = await error_of(Crm(http, "k").fiche("1001"))
    await http.close()
    assert (type(error), error.code) == (TransientError, "TIMEOUT")


async def test_a_wrong_address_is_not_a_fiche_that_is_gone(sandbox: SandboxProcess) -> None:
    http = VendorHttp("crm", f"{sandbox.url}/nowhere", deadline=30, now=lambda: NOW)
    for call in (Crm(http, "k").sales(DAY), Crm(http, "k").fiche("1001")):
        error = await error_of(call)
        assert (type(error), error.code) == (PermanentError, "VENDOR_REFUSED")
        assert "check CRM_BASE_URL" in error.message
    await http.close()


@pytest.mark.req("G-90")
@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ({"success": False, "message": "Fiche not_found"}, "NOT_FOUND"),
        ({"success": False, "message": "no such route"}, "VENDOR_REFUSED"),
        ({"success": True, "message": "NOT_FOUND"}, "VENDOR_REFUSED"),
        ({"message": "NOT_FOUND"}, "VENDOR_REFUSED"),
        ({"detail": "Not Found"}, "VENDOR_REFUSED"),
        ("NOT_FOUND", "VENDOR_REFUSED"),
    ],
)
async def test_of_a_404_only_the_crm_s_own_says_that_a_fiche_is_gone(answer: Any, code: str) -> None:
    error = await error_of(fiche_from(answer, status=404))
    assert (type(error), error.code) == (PermanentError, code)


async def test_a_key_that_is_refused_is_named(crm_http: VendorHttp) -> None:
    own = Crm(crm_http, "forbidden", Names("CRM_BASE_URL", "the API key of this schedule"))
    assert "does not accept the API key of this schedule" in (await error_of(own.sales(DAY))).message


async def test_without_address_or_key_each_call_says_what_to_set(crm_http: VendorHttp, sandbox: SandboxProcess) -> None:
    for crm in (Crm(None, "k"), Crm(crm_http, None), Crm(crm_http, "")):
        for call in (crm.fiche("1001"), crm.sales(DAY)):
            error = await error_of(call)
            assert (type(error), error.code) == (PermanentError, "NOT_CONFIGURED")
            assert "set CRM_BASE_URL and CRM_API_KEY" in error.message
    assert sandbox.ledger(kind="call") == []


@pytest.mark.req("AUT-99")
async def test_not_found_is_recognised_however_it_is_spelled() -> None:
    error = await error_of(fiche_from({"success": False, "message": "fiche not_found"}))
    assert (type(error), error.code) == (PermanentError, "NOT_FOUND")
