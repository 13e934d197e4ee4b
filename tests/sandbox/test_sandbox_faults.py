"""Each kind of fault as a client sees it, and which calls a rule hits."""

from __future__ import annotations

import asyncio
import errno
import json
import random
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import pytest
from aiohttp import ClientTimeout

from ecluse.testing.sandbox import SandboxProcess
from tests.sandbox.client import Client

ARTICLE = "price-list/articles/SKU-00042"
PRICE = f"{ARTICLE}/price"
NEW_PRICE = {"price": "12.50"}


def last_call(sandbox: SandboxProcess) -> dict[str, Any]:
    return sandbox.ledger(kind="call")[-1]


async def outcome(sandbox: SandboxProcess) -> tuple[int | None, str | None, int]:
    """The last call's status and fault, and how many effects there were, once no call is in flight."""
    while sandbox.stats()["price_list"]["in_flight"]:
        await asyncio.sleep(0.01)
    call = last_call(sandbox)
    return call["status"], call["fault"], len(sandbox.ledger(kind="effect"))


@pytest.mark.parametrize(
    ("rule", "status"),
    [
        ({"kind": "throttle"}, 429),
        ({"kind": "server_error"}, 503),
        ({"kind": "server_error", "status": 502}, 502),
        ({"kind": "not_found"}, 404),
        ({"kind": "unauthorized"}, 401),
        ({"kind": "redirect", "location": "/elsewhere"}, 302),
    ],
)
async def test_a_refusal_applies_nothing(
    http: Client, sandbox: SandboxProcess, rule: dict[str, Any], status: int
) -> None:
    sandbox.set_faults([rule])
    answer = await http.put(PRICE, json=NEW_PRICE, allow_redirects=False)
    assert answer.status == status
    assert isinstance(answer.json()["error"]["message"], str)
    assert answer.headers.get("Location") == rule.get("location")
    assert await outcome(sandbox) == (status, rule["kind"], 0)


@pytest.mark.parametrize(
    ("retry_after", "header"), [(3, "3"), (0.5, "0.5"), (None, None), ("soon", "soon"), ("-1", "-1")]
)
async def test_throttle_says_when_to_come_back(
    http: Client, sandbox: SandboxProcess, retry_after: object, header: str | None
) -> None:
    sandbox.set_faults([{"kind": "throttle", "retry_after": retry_after}])
    assert (await http.get(ARTICLE)).headers.get("Retry-After") == header


async def test_throttle_can_say_it_as_a_date(http: Client, sandbox: SandboxProcess) -> None:
    sandbox.set_faults([{"kind": "throttle", "retry_after": "date", "seconds": 90}])
    answer = await http.get(ARTICLE)
    wait = parsedate_to_datetime(answer.headers["Retry-After"]) - datetime.now(UTC)
    assert answer.headers["Retry-After"].endswith("GMT")
    assert 85 < wait.total_seconds() <= 91


async def test_timeout_never_answers_and_then_cuts(http: Client, sandbox: SandboxProcess) -> None:
    sandbox.set_faults([{"kind": "timeout", "seconds": 0.3}])
    began = time.monotonic()
    with pytest.raises(aiohttp.ServerDisconnectedError):
        await http.put(PRICE, json=NEW_PRICE)
    assert 0.3 <= time.monotonic() - began < 2
    assert await outcome(sandbox) == (None, "timeout", 0)


async def test_timeout_lets_go_of_a_client_that_hung_up(http: Client, sandbox: SandboxProcess) -> None:
    sandbox.set_faults([{"kind": "timeout", "seconds": 60}])
    with pytest.raises(TimeoutError):
        await http.get(ARTICLE, timeout=ClientTimeout(total=0.1))
    assert await asyncio.wait_for(outcome(sandbox), 2) == (None, "timeout", 0)


async def test_slow_body_trickles(http: Client, sandbox: SandboxProcess) -> None:
    whole = (await http.get(ARTICLE)).body
    sandbox.set_faults([{"kind": "slow_body", "chunk": len(whole) // 4 + 1, "delay": 0.08}])
    began = time.monotonic()
    async with http.session.get(ARTICLE) as answer:
        headers_after = time.monotonic() - began
        assert await answer.read() == whole
    assert headers_after < 0.08
    assert time.monotonic() - began >= 4 * 0.08
    assert await outcome(sandbox) == (200, "slow_body", 0)


async def test_slow_body_outlives_its_client(http: Client, sandbox: SandboxProcess) -> None:
    sandbox.set_faults([{"kind": "slow_body", "chunk": 1, "delay": 0.02}])
    with pytest.raises(TimeoutError):
        await http.put(PRICE, json=NEW_PRICE, timeout=ClientTimeout(total=0.1))
    assert await asyncio.wait_for(outcome(sandbox), 2) == (None, "slow_body", 1)


async def test_truncated_promises_more_than_it_sends(http: Client, sandbox: SandboxProcess) -> None:
    whole = (await http.get(ARTICLE)).body
    sandbox.set_faults([{"kind": "truncated"}])
    async with http.session.get(ARTICLE) as answer:
        assert (answer.status, answer.headers["Content-Length"]) == (200, str(len(whole)))
        assert await answer.content.readexactly(len(whole) // 2) == whole[: len(whole) // 2]
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.content.readany()
    assert await outcome(sandbox) == (200, "truncated", 0)


async def test_invalid_json_is_a_whole_answer_of_half_a_text(http: Client, sandbox: SandboxProcess) -> None:
    sandbox.set_faults([{"kind": "invalid_json"}])
    answer = await http.get(ARTICLE)
    body = answer.body
    assert (answer.status, answer.headers["Content-Length"]) == (200, str(len(body)))
    with pytest.raises(ValueError, match="line 1"):
        json.loads(body)


async def test_wrong_shape_is_json_all_the_same(http: Client, sandbox: SandboxProcess) -> None:
    sandbox.set_faults([{"kind": "wrong_shape"}])
    answer = await http.get(ARTICLE)
    assert (answer.status, type(answer.json())) == (200, list)


@pytest.mark.parametrize(
    ("kind", "escape", "mark"), [("nul_byte", b"\\u0000", "\0"), ("bad_unicode", b"\\ud800", "\ud800")]
)
async def test_a_tainted_text_is_in_the_name(
    http: Client, sandbox: SandboxProcess, kind: str, escape: bytes, mark: str
) -> None:
    clean = (await http.get(ARTICLE)).json()
    sandbox.set_faults([{"kind": kind}])
    answer = await http.get(ARTICLE)
    assert (answer.status, escape in answer.body) == (200, True)
    tainted = answer.json()
    assert mark in tainted["name"]
    assert tainted | {"name": tainted["name"].replace(mark, "")} == clean
    empty_page = await http.get("price-list/articles?offset=10000")
    assert escape in empty_page.body


@pytest.mark.parametrize("size", [16, 65_550, 3_000_001])
async def test_huge_body_is_json_of_that_many_bytes(http: Client, sandbox: SandboxProcess, size: int) -> None:
    sandbox.set_faults([{"kind": "huge_body", "bytes": size}])
    body = (await http.get(ARTICLE)).body
    assert (len(body), list(json.loads(body))) == (size, ["padding"])


async def test_applied_then_error_has_applied(http: Client, sandbox: SandboxProcess) -> None:
    sandbox.set_faults([{"kind": "applied_then_error", "times": 1}])
    assert (await http.put(PRICE, json=NEW_PRICE)).status == 500
    assert await outcome(sandbox) == (500, "applied_then_error", 1)
    [effect] = sandbox.ledger(kind="effect")
    assert (effect["call_seq"], effect["value"]) == (last_call(sandbox)["seq"], "12.50")
    assert (await http.get(ARTICLE)).json()["price"] == "12.50"


async def test_applied_then_error_on_a_read_is_an_error(http: Client, sandbox: SandboxProcess) -> None:
    sandbox.set_faults([{"kind": "applied_then_error", "status": 504}])
    assert (await http.get(ARTICLE)).status == 504
    assert await outcome(sandbox) == (504, "applied_then_error", 0)


@pytest.mark.parametrize(("kind", "effects"), [("reset", 0), ("applied_then_reset", 1)])
async def test_a_reset_is_a_reset(http: Client, sandbox: SandboxProcess, kind: str, effects: int) -> None:
    sandbox.set_faults([{"kind": kind}])
    with pytest.raises(aiohttp.ClientOSError) as caught:
        await http.put(PRICE, json=NEW_PRICE)
    assert caught.value.errno == errno.ECONNRESET
    assert await outcome(sandbox) == (None, kind, effects)


async def test_an_answer_spoilt_after_a_write_has_written(http: Client, sandbox: SandboxProcess) -> None:
    sandbox.set_faults([{"kind": "invalid_json"}])
    await http.put(PRICE, json=NEW_PRICE)
    assert await outcome(sandbox) == (200, "invalid_json", 1)


async def test_latency_only_delays(http: Client, sandbox: SandboxProcess) -> None:
    sandbox.set_faults([{"kind": "latency", "seconds": 0.15}])
    began = time.monotonic()
    assert (await http.get(ARTICLE)).status == 200
    assert time.monotonic() - began >= 0.15
    assert await outcome(sandbox) == (200, "latency", 0)


async def test_latency_adds_up_and_a_later_rule_decides(http: Client, sandbox: SandboxProcess) -> None:
    slow = {"kind": "latency", "seconds": 0.1}
    sandbox.set_faults([slow, slow, {"kind": "server_error"}, {"kind": "not_found"}])
    began = time.monotonic()
    assert (await http.get(ARTICLE)).status == 503
    assert time.monotonic() - began >= 0.2
    assert await outcome(sandbox) == (503, "server_error", 0)


async def test_a_write_is_applied_though_its_client_hung_up(http: Client, sandbox: SandboxProcess) -> None:
    sandbox.set_faults([{"kind": "latency", "seconds": 0.3}])
    with pytest.raises(TimeoutError):
        await http.put(PRICE, json=NEW_PRICE, timeout=ClientTimeout(total=0.1))
    assert await asyncio.wait_for(outcome(sandbox), 2) == (None, "latency", 1)
    call = last_call(sandbox)
    assert call["done_at"] - call["at"] >= 0.3


async def statuses(http: Client, *skus: str, method: str = "GET") -> list[int]:
    return [(await http.request(method, f"price-list/articles/{sku}")).status for sku in skus]


async def test_a_rule_keeps_to_its_ids_and_methods(http: Client, sandbox: SandboxProcess) -> None:
    sandbox.set_faults([{"kind": "server_error", "vendor": "price_list", "ids": ["SKU-00002"], "methods": ["get"]}])
    assert await statuses(http, "SKU-00001", "SKU-00002", "SKU-00003") == [200, 503, 200]
    assert await statuses(http, "SKU-00002", method="DELETE") == [405]


async def test_after_times_and_per_id_times_count(http: Client, sandbox: SandboxProcess) -> None:
    a, b = "SKU-00001", "SKU-00002"
    sandbox.set_faults([{"kind": "server_error", "after": 2, "times": 3}])
    assert await statuses(http, a, b, a, b, a, b) == [200, 200, 503, 503, 503, 200]
    sandbox.set_faults([{"kind": "server_error", "per_id_times": 1}])
    assert await statuses(http, a, a, b, a, b) == [503, 200, 503, 200, 200]


async def test_a_creation_can_be_singled_out_by_its_key(http: Client, sandbox: SandboxProcess) -> None:
    sandbox.set_faults([{"kind": "server_error", "ids": ["k2"]}])
    found = [
        (await http.post("price-list/articles", json={"name": "Étau"} | NEW_PRICE, headers={"Idempotency-Key": key}))
        for key in ("k1", "k2")
    ]
    assert [answer.status for answer in found] == [201, 503]


async def faulted(sandbox: SandboxProcess, skus: list[str]) -> dict[str, list[int]]:
    """Three calls in a row for each SKU, all SKUs at once and in an order of their own each time."""
    sandbox.reset()
    sandbox.set_faults([{"kind": "server_error", "rate": 0.3}, {"kind": "throttle", "rate": 0.3}])
    skus = random.sample(skus, len(skus))
    http = Client(sandbox.url)
    async with http.session:
        found = await asyncio.gather(*(statuses(http, sku, sku, sku) for sku in skus))
    return dict(zip(skus, found, strict=True))


async def test_the_same_seed_hits_the_same_calls_whatever_their_order(
    sandbox: SandboxProcess, other_seed: SandboxProcess
) -> None:
    skus = [f"SKU-{n:05d}" for n in range(1, 201)]
    first = await faulted(sandbox, skus)
    assert await faulted(sandbox, skus) == first
    assert await faulted(sandbox, skus[50:80]) == {sku: first[sku] for sku in skus[50:80]}
    everything = [status for three in first.values() for status in three]
    assert 0.2 < everything.count(503) / 600 < 0.4
    assert 0.12 < everything.count(429) / 600 < 0.3  # 0.3 of what the first rule left
    assert any(len(set(three)) > 1 for three in first.values())  # each attempt has a draw of its own
    assert await faulted(other_seed, skus) != first
