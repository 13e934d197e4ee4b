"""The guard of clients of vendors whose URL a user gave: every address of a host name is checked at each connect."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from ecluse.base.errors import NotSentError, PermanentError
from ecluse.vendors.guarded import GuardedHttp
from ecluse.vendors.http import VendorHttp
from tests.support.raw_server import NOW, Answer, answers, raw_server, response


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The addresses of host names."""
    known: dict[str, list[str]] = {}

    def look_up(host: str, port: Any, *_: Any, **__: Any) -> list[Any]:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return known


async def call(url: str, *allowed: str) -> Answer:
    guard = GuardedHttp(allowed)
    try:
        async with VendorHttp("crm", url, resolver=guard.resolver(url), deadline=30, now=lambda: NOW) as http:
            return await http.call("GET", "/", Answer)
    finally:
        await guard.close()


@pytest.mark.parametrize("addresses", [["10.0.0.1"], ["127.0.0.1"], ["169.254.169.254"], ["93.184.216.34", "10.0.0.1"]])
async def test_a_name_that_leads_to_a_private_address_is_refused(names, addresses):
    names["crm.example"] = addresses
    with pytest.raises(PermanentError) as caught:
        await call("http://crm.example")
    assert caught.value.code == "FORBIDDEN_URL"
    assert "ECLUSE_ALLOWED_NETWORKS" in caught.value.message or "addresses" in caught.value.message


async def test_a_name_in_an_allowed_network_is_reached(names):
    async with raw_server(answers(response())) as server:
        names["crm.example"] = ["127.0.0.1"]
        assert (await call(f"http://crm.example:{server.port}", "127.0.0.0/8")).ok


async def test_a_name_that_does_not_exist_is_a_failure_of_the_moment(names):
    with pytest.raises(NotSentError):
        await call("http://crm.example")
