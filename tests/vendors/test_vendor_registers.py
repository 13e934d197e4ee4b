"""The registers of companies: what they tell, and the canonical code of every failure."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from ecluse.base.errors import PermanentError, TransientError, VendorError
from ecluse.testing.sandbox import SandboxProcess
from ecluse.vendors.registers import RETRYABLE, Register, Source, canonical
from tests.support import registers
from tests.support.raw_server import answers, raw_server, response

Open = Callable[..., Register]


@pytest.fixture
async def opened(sandbox: SandboxProcess) -> AsyncIterator[Open]:
    made: list[Register] = []

    def open_(source: Source, **given: Any) -> Register:
        made.append(registers.at_sandbox(source, sandbox, **given))
        return made[-1]

    yield open_
    for one in made:
        await one.http.close()


@pytest.mark.req("ENR-05", "ENR-57", "ENR-58", "ENR-59")
@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (None, "TIMEOUT", "TIMEOUT"),
        (408, "", "TIMEOUT"),
        (503, "", "TIMEOUT"),
        (504, "", "TIMEOUT"),
        (429, "", "RATE_LIMIT"),
        (404, "", "NOT_FOUND"),
        (400, "", "BAD_REQUEST"),
        (422, "", "BAD_REQUEST"),
        (425, "", "BAD_REQUEST"),
        (401, "", "UNAUTHORIZED"),
        (403, "", "FORBIDDEN"),
        (500, "", "SERVER_ERROR"),
        (502, "", "SERVER_ERROR"),
        (302, "", "INVALID_RESPONSE"),
        (None, "VENDOR_UNREACHABLE", "NETWORK_ERROR"),
        (None, "VENDOR_DISCONNECTED", "NETWORK_ERROR"),
        (None, "BAD_ANSWER", "INVALID_RESPONSE"),
        (None, "ANSWER_TOO_LARGE", "INVALID_RESPONSE"),
        (None, "SOMETHING", "UNKNOWN"),
    ],
)
def test_every_failure_has_a_canonical_code(status: int | None, code: str, expected: str) -> None:
    assert {canonical(source, status, code) for source in Source} == {expected}


def test_a_conflict_is_a_limit_only_of_api_entreprise() -> None:
    assert canonical(Source.RCS, 409, "CONFLICT") == "RATE_LIMIT"
    assert canonical(Source.INPI, 409, "CONFLICT") == "BAD_REQUEST"


@pytest.mark.parametrize("source", Source)
@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 429, 500, 503])
async def test_an_error_is_transient_exactly_if_its_code_is_retryable(source: Source, status: int) -> None:
    body = response(b'{"secret name": "DUPONT"}', status=status, headers={"Retry-After": "7"})
    async with raw_server(answers(*[body] * 4)) as server:
        register = registers.made(source, registers.client_at(f"http://127.0.0.1:{server.port}"))
        with pytest.raises(VendorError) as caught:
            await register.facts(registers.SNCF)
        await register.http.close()
    error = caught.value
    assert isinstance(error, TransientError) is (error.code in RETRYABLE)
    assert error.status == status
    assert "DUPONT" not in error.message
    if status == 429 and isinstance(error, TransientError):
        assert error.retry_after == 7


async def test_a_wait_longer_than_the_lock_is_not_heeded() -> None:
    body = response(b"{}", status=429, headers={"Retry-After": "121"})
    async with raw_server(answers(body)) as server:
        register = registers.made(Source.SEARCH, registers.client_at(f"http://127.0.0.1:{server.port}"))
        with pytest.raises(TransientError) as caught:
            await register.facts(registers.SNCF)
        await register.http.close()
    assert caught.value.retry_after is None


async def test_each_register_tells_its_part(opened: Open) -> None:
    search, inpi, rcs = [await opened(source).facts(registers.SNCF) for source in Source]

    assert search["legal_name"] == "SOCIETE NATIONALE SNCF"
    assert search["head_office"]["siret"] == "55204944700014"
    assert search["establishments"][0]["head_office"] is True
    assert [one["type"] for one in search["directors"]] == ["person", "organisation"]
    assert inpi["capital_amount"] == rcs["capital_amount"]
    assert (inpi["fiscal_year_end"], rcs["fiscal_year_end"]) == ("12-31", "12-31")
    assert inpi["directors"][0]["role"] == "Président de SAS"
    assert rcs["observations"][0]["numero"] == "12197"
    assert "acronym" not in search


@pytest.mark.parametrize(
    ("siren", "code", "status"),
    [(registers.UNKNOWN, "NOT_FOUND", 200), (registers.ANOTHER, "INVALID_RESPONSE", 200)],
)
async def test_an_unknown_number_and_another_company(opened: Open, siren: str, code: str, status: int) -> None:
    with pytest.raises(PermanentError) as caught:
        await opened(Source.SEARCH).facts(siren)
    assert (caught.value.code, caught.value.status) == (code, status)


@pytest.mark.parametrize("kind", ["invalid_json", "wrong_shape", "bad_unicode", "huge_body", "truncated"])
@pytest.mark.parametrize("source", Source)
async def test_a_spoiled_answer_is_invalid_or_lost(
    sandbox: SandboxProcess, opened: Open, source: Source, kind: str
) -> None:
    sandbox.set_faults([{"vendor": registers.VENDORS[source], "kind": kind, "methods": ["GET"]}])
    with pytest.raises(VendorError) as caught:
        await opened(source).facts(registers.SNCF)
    assert caught.value.code == ("NETWORK_ERROR" if kind == "truncated" else "INVALID_RESPONSE")


async def test_a_page_of_html_is_invalid(opened: Open) -> None:
    with pytest.raises(PermanentError) as caught:
        await opened(Source.SEARCH).facts(registers.HTML)
    assert caught.value.code == "INVALID_RESPONSE"


async def test_a_nul_in_an_answer_can_be_stored(sandbox: SandboxProcess, opened: Open) -> None:
    sandbox.set_faults([{"vendor": "recherche_entreprises", "kind": "nul_byte"}])
    assert "\0" not in json.dumps(await opened(Source.SEARCH).facts(registers.SNCF), ensure_ascii=False)


@pytest.mark.req("ENR-55")
async def test_no_answer_in_time(sandbox: SandboxProcess, opened: Open) -> None:
    sandbox.set_faults([{"vendor": "recherche_entreprises", "kind": "timeout", "seconds": 2}])
    with pytest.raises(TransientError) as caught:
        await opened(Source.SEARCH, deadline=0.1).facts(registers.SNCF)
    assert (caught.value.code, caught.value.status) == ("TIMEOUT", None)


async def test_calls_at_once_share_one_log_in(sandbox: SandboxProcess, opened: Open) -> None:
    inpi, start = opened(Source.INPI), last_of(sandbox)
    await asyncio.gather(*(inpi.facts(siren) for siren in registers.some_sirens("31", 20)))
    assert len(log_ins(sandbox, start)) == 1

    sandbox.reset()  # its tokens are gone
    await asyncio.gather(*(inpi.facts(siren) for siren in registers.some_sirens("32", 20)))
    assert len(log_ins(sandbox, 0)) == 1


async def test_the_second_refusal_of_a_token_is_final(sandbox: SandboxProcess, opened: Open) -> None:
    inpi, start = opened(Source.INPI), last_of(sandbox)
    sandbox.set_faults([{"vendor": "inpi", "kind": "unauthorized", "methods": ["GET"]}])
    with pytest.raises(PermanentError) as caught:
        await inpi.facts(registers.SNCF)
    calls = [one for one in sandbox.ledger("inpi", "call", start) if one["method"] == "GET"]
    assert (caught.value.code, len(calls), len(log_ins(sandbox, start))) == ("UNAUTHORIZED", 2, 2)
    assert "INPI_PASSWORD" in caught.value.message


async def test_a_natural_person_is_its_own_director(opened: Open) -> None:
    facts = await opened(Source.INPI).facts(registers.PERSON)
    assert [one["role"] for one in facts["directors"]] == ["Entrepreneur individuel"]


def log_ins(sandbox: SandboxProcess, after: int) -> list[dict[str, Any]]:
    return [one for one in sandbox.ledger("inpi", "call", after) if one["path"].endswith("/login")]


def last_of(sandbox: SandboxProcess) -> int:
    return max((one["seq"] for one in sandbox.ledger()), default=0)


async def test_an_echo_of_password_and_token_is_hidden() -> None:
    company = {"siren": registers.SNCF, "formality": {"companyName": "canary-password canary-token"}}
    log_in = response(b'{"token": "canary-token"}')
    async with raw_server(answers(log_in, response(json.dumps(company).encode()))) as server:
        inpi = registers.made(Source.INPI, registers.client_at(f"http://127.0.0.1:{server.port}"), "canary-password")
        facts = await inpi.facts(registers.SNCF)
        await inpi.http.close()
    assert facts["legal_name"] == "*** ***"
