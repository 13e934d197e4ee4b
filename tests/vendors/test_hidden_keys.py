"""Keys in what a vendor says: an answer that repeats the request, whatever its status, shows nothing of the key."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import date
from typing import Any

import pytest

from ecluse.base.errors import VendorError
from ecluse.vendors.api_entreprise import ApiEntreprise, Purpose
from ecluse.vendors.crm import Crm
from ecluse.vendors.elevenlabs import ElevenLabs, Speech
from ecluse.vendors.hiding import HiddenKeys
from ecluse.vendors.http import VendorHttp
from ecluse.vendors.llm import Llm
from tests.support.raw_server import RawServer, Script, client_of, raw_server, response

KEY = "canary/7f3a-9c1e \u00e9 and a longer end"
PLAIN = "canary-7f3a9c1e5b"


def ask_llm(http: VendorHttp, key: str) -> Awaitable[Any]:
    wanted = {"system": "s", "user": "u", "schema": {}, "read": lambda value: value["never"], "name": "n"}
    return Llm(http, key, model="m").ask(**wanted)  # type: ignore[arg-type]


CALLS: dict[str, Callable[[VendorHttp, str], Awaitable[Any]]] = {
    "crm sales": lambda http, key: Crm(http, key).sales(date(2026, 3, 2)),
    "crm fiche": lambda http, key: Crm(http, key).fiche("1001"),
    "elevenlabs": lambda http, key: ElevenLabs(http, key, Speech()).transcribe(source_url="https://a.test/1.mp3"),
    "llm": ask_llm,
    "api entreprise": lambda http, key: ApiEntreprise(http, key, Purpose("1", "2", "3")).facts("552049447"),
}
# Bodies of each vendor's own shape, with {echo} where it repeats the request.
BODIES = {
    "plain": "{echo}",
    "crm": '{{"success": false, "message": "{echo}"}}',
    "elevenlabs": '{{"detail": {{"code": "invalid_api_key", "message": "{echo}"}}}}',
    "llm": '{{"error": {{"message": "Incorrect API key provided: {echo}", "code": "invalid_api_key"}}}}',
    "chat": '{{"model": "m", "choices": [{{"message": {{"content": "{echo}"}}}}]}}',
    "refused": '{{"model": "m", "choices": [{{"message": {{"refusal": "{echo}"}}}}]}}',
    "cut": '{{"x": "' + 280 * "x" + '{echo}"}}',
}


def echoing(body: str, status: int) -> Script:
    async def script(server: RawServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await server.request(reader)
        keys = [line for line in head.split("\r\n") if "canary" in line]
        echo = json.dumps(" ".join(keys))[1:-1]
        writer.write(response(body.format(echo=echo).encode(), status=status))
        await writer.drain()

    return script


@pytest.mark.parametrize("status", [200, 400, 401, 429, 500])
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("call", CALLS)
async def test_an_echoing_vendor_shows_nothing_of_the_key(call: str, body: str, status: int) -> None:
    async with raw_server(echoing(BODIES[body], status)) as server, client_of(server.port, deadline=30) as http:
        with pytest.raises(VendorError) as caught:
            await CALLS[call](http, PLAIN)
        assert PLAIN in server.requests[0]
    error = caught.value
    shown = f"{error.message} {error.args} {error.code}"
    assert "7f3a" not in shown
    assert error.message


@pytest.mark.parametrize(
    "spelled",
    [
        KEY,
        json.dumps(KEY)[1:-1],
        "canary%2F7f3a-9c1e%20%C3%A9%20and%20a%20longer%20end",
    ],
)
def test_a_key_is_removed_however_it_is_spelled(spelled: str) -> None:
    hidden = HiddenKeys()
    hidden.add(KEY)
    assert hidden.removed(f"<{spelled}>") == "<***>"
    assert hidden.in_answer(bytearray(f"<{spelled}>".encode())) == b"<***>"


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
