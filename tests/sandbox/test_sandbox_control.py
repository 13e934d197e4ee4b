"""The control routes: the ledger and its counts, fault rules and caps refused or removed, reset."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import pytest
from aiohttp import ServerDisconnectedError

from ecluse.testing.sandbox import SandboxProcess
from tests.sandbox.client import Client

ARTICLE = "price-list/articles/SKU-00042"


async def test_a_call_and_its_effect_are_in_the_ledger_in_full(http: Client, sandbox: SandboxProcess) -> None:
    began = time.time()
    headers = {"Idempotency-Key": "k1", "X-Client": "worker 3"}
    await http.put(f"{ARTICLE}/price?x=1", json={"price": "12.50"}, headers=headers)
    call, effect = sandbox.ledger()
    same = {"vendor": "price_list", "method": "PUT", "path": f"/{ARTICLE}/price?x=1", "ref": "SKU-00042"} | {
        "key": "k1",
        "client": "worker 3",
        "fault": None,
    }
    assert call.items() >= (same | {"seq": 1, "kind": "call", "call_seq": None, "status": 200, "value": None}).items()
    assert effect.items() >= (same | {"seq": 2, "kind": "effect", "call_seq": 1, "value": "12.50"}).items()
    assert began <= call["at"] <= effect["at"] <= call["done_at"] <= time.time()
    assert call["mono"] <= effect["mono"] <= time.monotonic()


async def test_a_call_in_flight_is_already_in_the_ledger(http: Client, sandbox: SandboxProcess) -> None:
    sandbox.set_faults([{"kind": "latency", "seconds": 0.3}])
    calling = asyncio.ensure_future(http.get(ARTICLE))
    await asyncio.sleep(0.1)
    [during] = sandbox.ledger()
    assert (during["ref"], during["status"], during["done_at"]) == ("SKU-00042", None, None)
    assert sandbox.stats()["price_list"]["by_status"] == {}
    await calling
    [after] = sandbox.ledger()
    assert (after["seq"], after["status"]) == (during["seq"], 200)
    assert after["done_at"] is not None


async def test_the_ledger_is_read_by_vendor_kind_and_page(http: Client, sandbox: SandboxProcess) -> None:
    for _ in range(3):
        await http.put(f"{ARTICLE}/price", json={"price": "12.50"})
    await http.get("no-such-vendor/x")

    async def page(query: str) -> tuple[list[int], int]:
        found = (await http.get(f"_sandbox/ledger?{query}")).json()
        return [entry["seq"] for entry in found["entries"]], found["last_seq"]

    assert await page("") == ([1, 2, 3, 4, 5, 6, 7], 7)
    assert await page("vendor=price_list&kind=effect&after=2&limit=1") == ([4], 7)
    assert await page("kind=call&after=1&limit=2") == ([3, 5], 7)
    assert await page("vendor=unknown") == ([7], 7)
    assert await page("limit=0") == ([], 7)
    assert (await http.get("_sandbox/ledger?after=x")).status == 400
    assert (await http.get("_sandbox/ledger?limit=-1")).status == 400


async def test_an_emptied_ledger_goes_on_counting(http: Client, sandbox: SandboxProcess) -> None:
    await http.get(ARTICLE)
    emptied = time.time()
    await http.delete("_sandbox/ledger")
    assert (await http.get("_sandbox/ledger")).json()["since"] >= emptied
    assert (sandbox.ledger(), sandbox.stats()) == ([], {})
    await http.get(ARTICLE)
    assert [entry["seq"] for entry in sandbox.ledger(after=1)] == [2]


async def test_a_call_to_no_vendor_is_in_the_ledger_too(http: Client, sandbox: SandboxProcess) -> None:
    assert (await http.get("price_list/articles")).status == 404
    [call] = sandbox.ledger()
    assert (call["vendor"], call["path"], call["status"]) == ("unknown", "/price_list/articles", 404)


async def test_a_header_that_is_not_unicode_is_in_the_ledger_too(sandbox: SandboxProcess) -> None:
    host, port = sandbox.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    sandbox.set_faults([{"kind": "server_error", "rate": 0}])
    writer.write(
        b"GET /price-list/articles HTTP/1.1\r\nHost: x\r\nIdempotency-Key: a\xffb\r\nConnection: close\r\n\r\n"
    )
    assert (await reader.read()).startswith(b"HTTP/1.1 200")
    writer.close()
    assert sandbox.ledger()[0]["key"] == "a\udcffb"


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_in_the_ledger(sandbox: SandboxProcess) -> None:
    host, port = sandbox.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b'PUT /%b/price HTTP/1.1\r\nHost: x\r\nContent-Length: 17\r\n\r\n{"price"' % ARTICLE.encode())
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    for _ in range(100):
        [call] = sandbox.ledger()
        if call["done_at"] is not None:
            break
        await asyncio.sleep(0.01)
    assert (call["method"], call["status"], call["done_at"] is None) == ("PUT", None, False)
    assert sandbox.stats()["price_list"]["in_flight"] == 0


async def test_the_counts_per_vendor(http: Client, sandbox: SandboxProcess) -> None:
    assert sandbox.stats() == {}
    await http.put(f"{ARTICLE}/price", json={"price": "12.50"})
    sandbox.set_faults([{"kind": "latency", "seconds": 0.2, "times": 3}, {"kind": "timeout", "seconds": 0, "after": 3}])
    await asyncio.gather(*(http.get(ARTICLE) for _ in range(3)))
    with pytest.raises(ServerDisconnectedError):
        await http.get(ARTICLE)
    stats = sandbox.stats()["price_list"]
    calls = sandbox.ledger(kind="call")
    assert stats == {
        "calls": 5,
        "effects": 1,
        "by_status": {"200": 4, "cut": 1},
        "by_fault": {"latency": 3, "timeout": 1},
        "in_flight": 0,
        "max_concurrent": 3,
        "first_call_at": calls[0]["at"],
        "last_call_at": calls[-1]["at"],
    }


async def test_rules_are_listed_and_removed(http: Client, sandbox: SandboxProcess) -> None:
    one, two = {"kind": "server_error"}, {"kind": "not_found", "rate": 0.5}
    assert (await http.post("_sandbox/faults", json=one)).json()["faults"] == [{"id": 1} | one]
    assert (await http.post("_sandbox/faults", json=[two])).json()["faults"] == [{"id": 2} | two]
    assert (await http.delete("_sandbox/faults/1")).status == 200
    assert (await http.delete("_sandbox/faults/1")).status == 404
    assert (await http.get("_sandbox/faults")).json() == {"faults": [{"id": 2} | two]}
    await http.delete("_sandbox/faults")
    assert (await http.get("_sandbox/faults")).json()["faults"] == []
    assert sandbox.set_faults([one]) == [{"id": 1} | one]


@pytest.mark.parametrize(
    ("rule", "field"),
    [
        ({}, "kind"),
        ({"kind": "boom"}, "kind"),
        ({"kind": ["reset"]}, "kind"),
        ({"kind": "reset", "vendor": "nobody"}, "vendor"),
        ({"kind": "reset", "rate": 1.1}, "rate"),
        ({"kind": "reset", "rate": "1"}, "rate"),
        ({"kind": "reset", "rate": math.nan}, "rate"),
        ({"kind": "reset", "ids": "SKU-00001"}, "ids"),
        ({"kind": "reset", "methods": [1]}, "methods"),
        ({"kind": "reset", "times": -1}, "times"),
        ({"kind": "reset", "after": True}, "after"),
        ({"kind": "reset", "per_id_times": 1.5}, "per_id_times"),
        ({"kind": "reset", "seconds": 3}, "seconds"),
        ({"kind": "server_error", "status": 200}, "status"),
        ({"kind": "slow_body", "chunk": 0}, "chunk"),
        ({"kind": "huge_body", "bytes": 3}, "bytes"),
        ({"kind": "throttle", "retry_after": "a\r\nb: c"}, "retry_after"),
        ({"kind": "throttle", "concurrency": 1}, "concurrency"),
        ({"kind": "refused"}, "code"),
        ({"kind": "redirect"}, "location"),
        ({"kind": "latency"}, "seconds"),
        ("reset", "fault rule"),
    ],
)
async def test_a_bad_rule_is_named_and_changes_nothing(
    http: Client, sandbox: SandboxProcess, rule: Any, field: str
) -> None:
    answer = await http.post("_sandbox/faults", json=[{"kind": "server_error"}, rule])
    message = answer.json()["error"]
    assert (answer.status, field in message.split(":")[0]) == (400, True), message
    assert (await http.get("_sandbox/faults")).json()["faults"] == []
    assert (await http.get(ARTICLE)).status == 200


async def test_a_body_that_is_not_json_is_refused(http: Client) -> None:
    assert (await http.post("_sandbox/faults", data=b"\xff")).status == 400
    assert (await http.post("_sandbox/limits", data=b"{")).status == 400


async def test_health_and_unknown_routes(http: Client) -> None:
    health = (await http.get("_sandbox/health")).json()
    others = ["pagerduty", "price_list", "recherche_entreprises", "shopify", "slack"]
    vendors = ["api_entreprise", "audio", "crm", "elevenlabs", "inpi", "llm", *others]
    assert health == {"ok": True, "seed": 1, "vendors": vendors}
    assert (await http.get("_sandbox/nothing")).status == 404


async def test_reset_makes_it_as_good_as_new(http: Client, sandbox: SandboxProcess) -> None:
    before = (await http.get(ARTICLE)).json()
    await http.put(f"{ARTICLE}/price", json={"price": "0.01"})
    sandbox.set_faults([{"kind": "server_error"}])
    sandbox.set_limits({"vendor": "price_list", "concurrency": 0})
    assert (await http.get(ARTICLE)).status == 429
    sandbox.reset()
    assert sandbox.ledger() == []
    assert (await http.get(ARTICLE)).json() == before
    assert [entry["seq"] for entry in sandbox.ledger()] == [1]
