"""Rate caps: what passes, what is refused, and how the ledger counts it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ecluse.testing.sandbox import SandboxProcess
from tests.sandbox.client import Client, Reply

ARTICLE = "price-list/articles/SKU-00042"


async def calls(http: Client, number: int, **headers: str) -> list[Reply]:
    return await asyncio.gather(*(http.get(ARTICLE, headers=headers) for _ in range(number)))


def statuses(answers: list[Reply]) -> list[int]:
    return sorted(answer.status for answer in answers)


async def test_a_burst_passes_and_the_rest_gets_a_retry_after(http: Client, sandbox: SandboxProcess) -> None:
    sandbox.set_limits({"vendor": "price_list", "per_minute": 30, "burst": 4})
    answers = await calls(http, 6)
    assert statuses(answers) == [200] * 4 + [429] * 2
    assert {answer.headers.get("Retry-After") for answer in answers if answer.status == 429} == {"2"}
    assert sandbox.stats()["price_list"]["by_fault"] == {"cap": 2}
    assert {entry["ref"] for entry in sandbox.ledger() if entry["fault"] == "cap"} == {"SKU-00042"}


async def test_tokens_come_back_at_the_rate(http: Client, sandbox: SandboxProcess) -> None:
    sandbox.set_limits({"vendor": "price_list", "per_second": 10, "burst": 2})
    assert statuses(await calls(http, 3)) == [200, 200, 429]
    await asyncio.sleep(0.11)
    assert statuses(await calls(http, 2)) == [200, 429]
    await asyncio.sleep(0.5)
    assert statuses(await calls(http, 4)) == [200, 200, 429, 429]  # never more than the burst


async def test_the_burst_is_a_period_worth_by_default(http: Client, sandbox: SandboxProcess) -> None:
    sandbox.set_limits({"vendor": "price_list", "per_minute": 3, "retry_after": False})
    answers = await calls(http, 4)
    assert statuses(answers) == [200, 200, 200, 429]
    assert not any("Retry-After" in answer.headers for answer in answers)


async def test_calls_in_flight_are_capped(http: Client, sandbox: SandboxProcess) -> None:
    sandbox.set_faults([{"kind": "latency", "seconds": 0.2}])
    sandbox.set_limits({"vendor": "price_list", "concurrency": 2})
    answers = await calls(http, 5)
    assert statuses(answers) == [200, 200, 429, 429, 429]
    assert {answer.headers.get("Retry-After") for answer in answers if answer.status == 429} == {"1"}
    assert statuses(await calls(http, 2)) == [200, 200]


async def test_a_cap_can_be_per_key(http: Client, sandbox: SandboxProcess) -> None:
    sandbox.set_limits({"vendor": "price_list", "per_minute": 1, "by": "header X-Api-Key"})
    assert statuses(await calls(http, 2, **{"X-Api-Key": "a"})) == [200, 429]
    assert statuses(await calls(http, 2, **{"X-Api-Key": "b"})) == [200, 429]
    assert statuses(await calls(http, 2)) == [200, 429]


async def test_two_caps_both_hold_and_a_refusal_costs_nothing(http: Client, sandbox: SandboxProcess) -> None:
    await http.post("_sandbox/limits", json={"vendor": "price_list", "per_minute": 3})
    await http.post("_sandbox/limits", json={"vendor": "price_list", "per_minute": 1, "by": "header X-Api-Key"})
    assert statuses(await calls(http, 5, **{"X-Api-Key": "a"})) == [200, 429, 429, 429, 429]
    assert statuses(await calls(http, 1, **{"X-Api-Key": "b"})) == [200]
    assert statuses(await calls(http, 1, **{"X-Api-Key": "c"})) == [200]
    assert statuses(await calls(http, 1, **{"X-Api-Key": "d"})) == [429]
    await http.delete("_sandbox/limits")
    assert statuses(await calls(http, 5)) == [200] * 5


async def test_a_refused_call_does_not_count_towards_the_faults(http: Client, sandbox: SandboxProcess) -> None:
    sandbox.set_limits({"vendor": "price_list", "concurrency": 0})
    sandbox.set_faults([{"kind": "server_error", "after": 1}])
    assert statuses(await calls(http, 3)) == [429] * 3
    await http.delete("_sandbox/limits")
    assert [(await http.get(ARTICLE)).status for _ in range(2)] == [200, 503]


@pytest.mark.parametrize(
    ("limit", "field"),
    [
        ({"per_second": 1}, "vendor"),
        ({"vendor": "nobody", "per_second": 1}, "vendor"),
        ({"vendor": "price_list"}, "per_second"),
        ({"vendor": "price_list", "per_second": 0}, "per_second"),
        ({"vendor": "price_list", "per_second": 1, "per_minute": 1}, "per_minute"),
        ({"vendor": "price_list", "per_second": 1, "burst": 0}, "burst"),
        ({"vendor": "price_list", "concurrency": -1}, "concurrency"),
        ({"vendor": "price_list", "per_second": 1, "by": "X-Api-Key"}, "by"),
        ({"vendor": "price_list", "per_second": 1, "retry_after": 3}, "retry_after"),
        ({"vendor": "price_list", "per_second": 1, "per_hour": 3}, "per_hour"),
        ([], "a limit must be an object, not []"),
    ],
)
async def test_a_bad_limit_is_named_and_changes_nothing(http: Client, limit: Any, field: str) -> None:
    answer = await http.post("_sandbox/limits", json=limit)
    assert (answer.status, answer.json()["error"].split(":")[0]) == (400, field)
    assert statuses(await calls(http, 3)) == [200] * 3
