"""Keys in what a vendor says: an answer that repeats the request, whatever its status, shows nothing of the key."""

from __future__ import annotations

import asyncio
import base64
import html
import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Awaitable, Callable
from datetime import date
from typing import Any
from urllib.parse import quote, quote_plus

import pytest

from ecluse import vendors
from ecluse.base.errors import VendorError
from ecluse.vendors.api_entreprise import ApiEntreprise, Purpose
from ecluse.vendors.connectors import CONNECTORS, opened
from ecluse.vendors.crm import Crm
from ecluse.vendors.elevenlabs import ElevenLabs, Speech
from ecluse.vendors.hiding import HiddenKeys
from ecluse.vendors.http import VendorHttp
from ecluse.vendors.inpi import InpiRne
from ecluse.vendors.llm import Llm
from ecluse.vendors.price_list import PriceList
from ecluse.vendors.recherche_entreprises import RechercheEntreprises
from ecluse.vendors.registers import Register, Source
from ecluse.vendors.shops import Shop
from tests.support import registers
from tests.support.raw_server import NOW, RawServer, Script, answers, client_of, raw_server, response

KEY = "canary/7f3a-9c1e \u00e9 and a longer end"
PLAIN = "canary-7f3a9c1e5b"
LOGS_IN = "a-good-password"  # the server answers it with PLAIN as the token


Call = Callable[[VendorHttp, str], Awaitable[Any]]


def ask_llm(http: VendorHttp, key: str) -> Awaitable[Any]:
    wanted = {"system": "s", "user": "u", "schema": {}, "read": lambda value: value["never"], "name": "n"}
    return Llm(http, key, model="m").ask(**wanted)  # type: ignore[arg-type]


def of_shop(connector: str, call: Callable[[Shop], Awaitable[Any]]) -> Call:
    async def called(http: VendorHttp, key: str) -> Any:
        wanted = {"currency": "EUR", "allowed_networks": ["127.0.0.0/8"], "now": lambda: NOW}
        async with opened(connector, http._base_url, key, **wanted) as shop:  # type: ignore[arg-type]
            return await call(shop)

    return called


CALLS: dict[str, Call] = {
    "crm sales": lambda http, key: Crm(http, key).sales(date(2026, 3, 2)),
    "crm fiche": lambda http, key: Crm(http, key).fiche("1001"),
    "elevenlabs": lambda http, key: ElevenLabs(http, key, Speech()).transcribe(source_url="https://a.test/1.mp3"),
    "llm": ask_llm,
    "inpi log-in": lambda http, key: InpiRne(http, "user@example.org", key).facts("552049447"),
    "inpi company": lambda http, _: InpiRne(http, "user@example.org", LOGS_IN).facts("552049447"),
    "api entreprise": lambda http, key: ApiEntreprise(http, key, Purpose("1", "2", "3")).facts("552049447"),
    **{f"{one} catalogue": of_shop(one, lambda shop: shop.catalogue(None)) for one in CONNECTORS},
    **{f"{one} facts": of_shop(one, lambda shop: shop.facts()) for one in CONNECTORS},
    **{f"{one} write": of_shop(one, lambda shop: shop.set_prices("p", {"v": 100}, key="k")) for one in CONNECTORS},
}
# Clients without a key, and parts of the clients in CALLS.
NO_KEY_IN_CALLS = {RechercheEntreprises, Register, PriceList}
# Bodies of each vendor's own shape, with {echo} where it repeats the request.
BODIES = {
    "plain": "{echo}",
    "crm": '{{"success": false, "message": "{echo}"}}',
    "elevenlabs": '{{"detail": {{"code": "invalid_api_key", "message": "{echo}"}}}}',
    "llm": '{{"error": {{"message": "Incorrect API key provided: {echo}", "code": "invalid_api_key"}}}}',
    "chat": '{{"model": "m", "choices": [{{"message": {{"content": "{echo}"}}}}]}}',
    "refused": '{{"model": "m", "choices": [{{"message": {{"refusal": "{echo}"}}}}]}}',
    "shopify": '{{"errors": [{{"message": "{echo}", "extensions": {{"code": "ACCESS_DENIED"}}}}]}}',
    "shopify code": '{{"errors": [{{"message": "no", "extensions": {{"code": "{echo}"}}}}]}}',
    "cut": '{{"x": "' + 280 * "x" + '{echo}"}}',
}

USER_ERROR = (
    '{{"data": {{"productVariantsBulkUpdate": {{"productVariants": [],'
    ' "userErrors": [{{"message": "{echo}", "code": "{echo}"}}]}}}}}}'
)


def echoing(body: str, status: int) -> Script:
    async def script(server: RawServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while said := await heard(server, reader):
            keys = [line for line in said.split("\r\n") if "canary" in line]
            echo = json.dumps(" ".join(keys))[1:-1]
            writer.write(token_of(said) or response(body.format(echo=echo).encode(), status=status))
            await writer.drain()

    return script


async def heard(server: RawServer, reader: asyncio.StreamReader) -> str:
    """Return the next request with its body, and have the server remember both."""
    head = await server.request(reader)
    size = re.search(r"(?i)content-length: (\d+)", head)
    body = (await reader.readexactly(int(size[1]))).decode() if size else ""
    server.requests[-1] += body
    return head + body


def token_of(said: str) -> bytes | None:
    return response(json.dumps({"token": PLAIN}).encode()) if LOGS_IN in said else None


@pytest.mark.parametrize("status", [200, 400, 401, 429, 500])
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("call", CALLS)
async def test_an_echoing_vendor_shows_nothing_of_the_key(call: str, body: str, status: int) -> None:
    async with raw_server(echoing(BODIES[body], status)) as server, client_of(server.port, deadline=30) as http:
        with pytest.raises(VendorError) as caught:
            await CALLS[call](http, PLAIN)
        assert any(PLAIN in request for request in server.requests)
    error = caught.value
    shown = f"{error.message} {error.args} {error.code}"
    assert "7f3a" not in shown
    assert error.message


async def test_the_refusal_of_one_price_shows_nothing_of_the_key() -> None:
    async with raw_server(echoing(USER_ERROR, 200)) as server, client_of(server.port, deadline=30) as http:
        (error,) = (await CALLS["shopify write"](http, PLAIN)).values()
    assert PLAIN in server.requests[0]
    assert "refused the price" in error.message
    assert "7f3a" not in f"{error.message} {error.args} {error.code}"


def test_every_client_of_a_vendor_is_called_by_these_tests() -> None:
    modules = [importlib.import_module(f"ecluse.vendors.{one.name}") for one in pkgutil.iter_modules(vendors.__path__)]
    clients = {
        kind
        for module in modules
        for kind in vars(module).values()
        if inspect.isclass(kind) and kind.__module__ == module.__name__ and kind is not Shop
        if "http" in inspect.signature(kind.__init__).parameters
    }
    here = {Crm, ElevenLabs, Llm, InpiRne, ApiEntreprise, *CONNECTORS.values()}
    assert clients == here | NO_KEY_IN_CALLS


@pytest.mark.parametrize("headers", [{"Location": "{echo}"}, {"Retry-After": "{echo}"}, {"X-Echo": "{echo}"}])
@pytest.mark.parametrize("call", CALLS)
async def test_a_redirect_or_a_header_or_a_status_text_shows_nothing_of_the_key(
    call: str, headers: dict[str, str]
) -> None:
    async def script(server: RawServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await heard(server, reader):
            said = {name: value.format(echo=f"https://a.test/{PLAIN}?k={PLAIN}") for name, value in headers.items()}
            status = 302 if "Location" in headers else 503
            head = response(b"", status=status, headers=said)
            writer.write(token_of(request) or head.replace(b"Whatever", PLAIN.encode()))
            await writer.drain()

    async with raw_server(script) as server, client_of(server.port, deadline=30) as http:
        with pytest.raises(VendorError) as caught:
            await CALLS[call](http, PLAIN)
    assert "7f3a" not in f"{caught.value.message} {caught.value.args} {caught.value.code}"


@pytest.mark.parametrize("pieces", [[400], [1, 3, 3, 400], [1] * 90])
@pytest.mark.parametrize("call", ["crm fiche", "llm", "elevenlabs", "inpi log-in", "api entreprise", "shopify facts"])
async def test_a_key_in_pieces_or_cut_off_by_a_lost_connection_is_hidden(call: str, pieces: list[int]) -> None:
    """The body is sent in pieces, and the connection is lost within the key."""
    for cut in range(4, len(PLAIN)):
        body = f'{{"said": "no: {PLAIN}", "again": "{PLAIN[:cut]}'.encode()

        async def script(
            server: RawServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes = body
        ) -> None:
            await server.request(reader)
            writer.write(b"HTTP/1.1 400 No\r\nContent-Length: 1000\r\n\r\n")
            start = 0
            for size in pieces:
                writer.write(body[start : start + size])
                await writer.drain()
                await asyncio.sleep(0)
                start += size

        async with raw_server(script) as server, client_of(server.port, deadline=30) as http:
            with pytest.raises(VendorError) as caught:
                await CALLS[call](http, PLAIN)
        assert "canar" not in caught.value.message
        # The registers' answers are never quoted.
        assert "no: ***" in caught.value.message or call in ("inpi log-in", "api entreprise")


SPELLED = [
    KEY,
    json.dumps(KEY)[1:-1],
    json.dumps(KEY)[1:-1].replace("/", "\\/"),
    quote(KEY, safe=""),
    quote(KEY),
    quote_plus(KEY),
    "canary%2f7f3a-9c1e%20%c3%a9%20and%20a%20longer%20end",
    html.escape(KEY),
]
BASE64 = base64.b64encode(KEY.encode()).decode()


@pytest.mark.parametrize("spelled", [*SPELLED, BASE64])
@pytest.mark.parametrize("echoed", ["password", "token", "RCS"])
async def test_the_facts_of_a_register_that_repeats_its_credentials_have_none_of_them(
    echoed: str, spelled: str
) -> None:
    """The body is JSON, so that spellings with escapes stand in it as they are, or escaped once more."""
    facts = {
        "siren": registers.SNCF,
        "formality": {"companyName": spelled},
        "personne_morale": {"denomination": spelled, "forme_juridique": {}},
    }
    told = json.dumps({**facts, "data": facts}, ensure_ascii=False)
    told = told.replace(json.dumps(spelled, ensure_ascii=False), f'"{spelled}"') if "\\" in spelled else told
    log_in = response(json.dumps({"token": KEY if echoed == "token" else "t" * 20}).encode())
    found = answers(log_in, response(told.encode())) if echoed != "RCS" else answers(response(told.encode()))
    async with raw_server(found) as server, client_of(server.port, deadline=30) as http:
        source = Source.RCS if echoed == "RCS" else Source.INPI
        register = registers.made(source, http, LOGS_IN if echoed == "token" else KEY)
        shown = json.dumps(await register.facts(registers.SNCF))
    assert "***" in shown
    assert "7f3a" not in shown
    assert BASE64[4:-4] not in shown


MARKUP = "canary&7f3a<9c1e>\"and'more"


@pytest.mark.parametrize(
    "spelled",
    [
        html.escape(MARKUP),
        html.escape(MARKUP, quote=False),
        html.escape(MARKUP).replace("&#x27;", "&#39;").replace("&quot;", "&#34;"),  # as Go and Jinja write it
        r"canary\u00267f3a\u003c9c1e\u003e\"and'more",  # as Go writes JSON
        r"canary\u00267f3a\u003C9c1e\u003E\u0022and\u0027more",  # as PHP can write it
    ],
)
def test_a_key_with_characters_of_html_is_removed(spelled: str) -> None:
    assert HiddenKeys(MARKUP).removed(f"<{spelled}>") == "<***>"


@pytest.mark.parametrize("spelled", SPELLED)
def test_a_key_is_removed_however_it_is_spelled(spelled: str) -> None:
    hidden = HiddenKeys()
    hidden.add(KEY)
    assert hidden.removed(f"<{spelled}>") == "<***>"
    assert hidden.in_answer(bytearray(f"<{spelled}>".encode())) == b"<***>"


@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode])
@pytest.mark.parametrize("before", ["", "u", "us", "user:", "Bearer ", "\0name\0"])
@pytest.mark.parametrize("after", ["", ":", "\0\0", ", and the rest of the request"])
def test_a_key_is_removed_from_base64_wherever_it_begins(before: str, after: str, encode: Any) -> None:
    key = "canary?7f3a>>~~9c1e"
    hidden = HiddenKeys()
    hidden.add(key)
    text = encode(f"{before}{key}{after}".encode()).decode()
    for shown in (hidden.removed(text), hidden.in_answer(bytearray(text.encode())).decode()):
        assert "***" in shown
        for left in shown.split("***"):
            clean = left.rstrip("=").translate(str.maketrans("-_", "+/"))
            assert b"7f3a" not in base64.b64decode(clean[: len(clean) // 4 * 4])
        assert len(shown.replace("***", "").rstrip("=")) * 6 / 8 <= len(before + after) + 3


def test_a_short_word_is_not_taken_for_a_key() -> None:
    hidden = HiddenKeys()
    for word in ("key", None, ""):
        hidden.add(word)
    assert hidden.removed("the key of the CRM") == "the key of the CRM"


async def test_what_looks_like_a_secret_of_another_party_is_masked() -> None:
    said = b'{"success": false, "message": "NOPE", "headers": {"Cookie": "session=abcdef123456"}, "token": "t0ps3cret"}'

    async def script(server: RawServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        writer.write(response(said, status=400))

    async with raw_server(script) as server, client_of(server.port, deadline=30) as http:
        with pytest.raises(VendorError) as caught:
            await Crm(http, "k").fiche("1001")
    assert "NOPE" in caught.value.message
    assert "t0ps3cret" not in caught.value.message
    assert "abcdef123456" not in caught.value.message
