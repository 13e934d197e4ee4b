"""The example flow as a user runs it: real engine, real HTTP, the sandbox's ledger as the witness."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from ecluse.base.errors import InvalidInput
from ecluse.base.ids import effect_id
from ecluse.engine import Flow, RetryPolicy, Start
from ecluse.vendors.http import VendorHttp
from ecluse.vendors.price_list import PriceList
from hello_flow import FLOW
from tests.support.runs import start_run, wait_for_run

BUDGET = 3
PATIENCE = timedelta(seconds=60)
DEADLINE = timedelta(seconds=0.4)


@asynccontextmanager
async def hasty(clock):
    http = VendorHttp(
        "price list", os.environ["PRICE_LIST_URL"], deadline=DEADLINE.total_seconds(), now=clock.now, connections=50
    )
    try:
        yield PriceList(http)
    finally:
        await http.close()


def with_budget(executions: int) -> Flow:
    """The flow of the examples, with short pauses."""
    retry = RetryPolicy(executions=executions, base=0.02)
    return replace(FLOW, stages=tuple(replace(stage, retry=retry) for stage in FLOW.stages))


def in_haste(executions: int) -> Flow:
    """And with less patience with the vendor."""
    read, *writes = with_budget(executions).stages
    writes = [replace(stage, work=replace(stage.work, quiet=2 * DEADLINE)) for stage in writes]
    return replace(FLOW, stages=(read, *writes), vendors=hasty)


@pytest.fixture
def hello(sandbox, monkeypatch) -> Flow:
    monkeypatch.setenv("PRICE_LIST_URL", f"{sandbox.url}/price-list")
    return with_budget(BUDGET)


async def run(kit, flow: Flow, **given):
    started = await start_run(kit, Start(flow, "key", input=given))
    return await wait_for_run(kit, started.run.id, PATIENCE)


def counts(row):
    return tuple(row[name] for name in ("status", "selected", "successful", "failed", "ignored"))


async def test_every_price_is_read_once_and_stored(start_kit, hello, sandbox, query):
    kit = await start_kit(hello)
    assert counts(await run(kit, hello, articles=300)) == ("completed", 300, 300, 0, 0)
    calls = sandbox.ledger(vendor="price_list", kind="call")
    assert sorted(call["ref"] for call in calls) == [f"SKU-{n:05d}" for n in range(1, 301)]
    stored = dict(query("SELECT sku, price FROM hello_prices"))
    assert len(stored) == 300
    assert all(isinstance(price, Decimal) and price > 0 for price in stored.values())


WORTH_REPEATING = {
    "throttled": {"kind": "throttle", "retry_after": None},
    "request timeout": {"kind": "server_error", "status": 408},
    "internal error": {"kind": "server_error", "status": 500},
    "bad gateway": {"kind": "server_error", "status": 502},
    "unavailable": {"kind": "server_error", "status": 503},
    "connection reset": {"kind": "reset"},
    "invalid JSON": {"kind": "invalid_json"},
    "truncated": {"kind": "truncated"},
    "broken Unicode": {"kind": "bad_unicode"},
}
FINAL = {
    "bad request": ({"kind": "server_error", "status": 400}, "failed"),
    "unauthorized": ({"kind": "unauthorized"}, "failed"),
    "forbidden": ({"kind": "server_error", "status": 403}, "failed"),
    "not found": ({"kind": "not_found"}, "ignored"),
}


@pytest.mark.req("ENG-43", "ENG-46", "ENG-44")
@pytest.mark.parametrize("fault", WORTH_REPEATING.values(), ids=WORTH_REPEATING)
async def test_what_may_heal_is_called_as_often_as_the_budget_says(start_kit, hello, sandbox, one, fault):
    sandbox.set_faults([{**fault, "ids": ["SKU-00001"]}])
    kit = await start_kit(hello)
    assert counts(await run(kit, hello, articles=2)) == ("partial", 2, 1, 1, 0)
    calls = [call["ref"] for call in sandbox.ledger(vendor="price_list", kind="call")]
    assert (calls.count("SKU-00001"), calls.count("SKU-00002")) == (BUDGET, 1), "exactly one call per execution"
    assert one("SELECT count(*) FROM attempts") == BUDGET


@pytest.mark.req("ENG-43")
@pytest.mark.parametrize(("fault", "outcome"), FINAL.values(), ids=FINAL)
async def test_a_refusal_is_final(start_kit, hello, sandbox, one, fault, outcome):
    sandbox.set_faults([{**fault, "ids": ["SKU-00001"]}])
    kit = await start_kit(hello)
    row = await run(kit, hello, articles=2)
    assert (row["successful"], row[outcome]) == (1, 1)
    calls = [call["ref"] for call in sandbox.ledger(vendor="price_list", kind="call")]
    assert calls.count("SKU-00001") == 1


@pytest.mark.req("ENG-42")
@pytest.mark.parametrize("form", [{"retry_after": 1}, {"retry_after": "date", "seconds": 2}], ids=["seconds", "date"])
async def test_a_vendor_that_says_when_is_left_alone_until_then(start_kit, hello, sandbox, form):
    sandbox.set_faults([{"kind": "throttle", "ids": ["SKU-00001"], "times": 1, **form}])
    kit = await start_kit(hello)
    assert counts(await run(kit, hello, articles=1)) == ("completed", 1, 1, 0, 0)
    first, second = (call["at"] for call in sandbox.ledger(vendor="price_list", kind="call"))
    # An HTTP date has whole seconds: what is left of the one that says "in two" may be little more than one.
    assert second - first >= 0.99


async def test_faults_of_every_kind_at_once_end_in_one_outcome_each(start_kit, hello, sandbox, query, one):
    sandbox.set_faults(
        [
            {"kind": "not_found", "ids": ["SKU-00007", "SKU-00077"]},
            {"kind": "unauthorized", "ids": ["SKU-00011"]},
            {"kind": "server_error", "rate": 0.2, "per_id_times": 2},
            {"kind": "reset", "rate": 0.1, "per_id_times": 1},
            {"kind": "truncated", "rate": 0.1, "per_id_times": 1},
        ]
    )
    kit = await start_kit(patient := with_budget(8))
    row = await run(kit, patient, articles=200)
    assert row["selected"] == row["successful"] + row["failed"] + row["ignored"] == 200
    assert row["ignored"] == 2
    assert ("SKU-00011", "UNAUTHORIZED") in query("SELECT target, error_code FROM outcomes WHERE outcome = 'failed'")
    assert one("SELECT count(*) FROM hello_prices") == row["successful"]
    calls = sandbox.ledger(vendor="price_list", kind="call")
    assert len(calls) == one("SELECT sum(executions) FROM items"), "every call is an execution on record"


# ── Writes ─────────────────────────────────────────────────────────────────────────────────────────────────────────


REFUSED = [
    {"raise_percent": "-99.01"},
    {"raise_percent": 1000.5},
    {"raise_percent": "a lot"},
    {"raise_percent": "NaN"},
    {"twins": "perhaps"},
    {"twin": True},
    {"articles": -1},
    {"articles": 100_001},
]


async def test_a_wish_that_makes_no_sense_is_refused(start_kit, hello, one):
    kit = await start_kit(hello)
    for given in REFUSED:
        with pytest.raises(InvalidInput, match=next(iter(given))):
            await start_run(kit, Start(hello, "key", input=given))
    assert one("SELECT count(*) FROM runs") == 0


@pytest.mark.parametrize("percent", ["-99", "1000", "0"])
def test_the_bounds_themselves_are_accepted(percent):
    assert FLOW.input.model_validate({"raise_percent": percent}).raise_percent == Decimal(percent)


async def test_nothing_is_written_unless_asked(start_kit, hello, sandbox, query):
    kit = await start_kit(hello)
    assert counts(await run(kit, hello, articles=20)) == ("completed", 20, 20, 0, 0)
    assert {call["method"] for call in sandbox.ledger(kind="call")} == {"GET"}
    assert (sandbox.ledger(kind="effect"), query("SELECT 1 FROM effects")) == ([], [])
    assert query("SELECT stage FROM stages") == [("read",)]


def written(sandbox, method: str) -> dict[str, list[dict]]:
    """What the vendor really did, by the key that we gave it."""
    done: dict[str, list[dict]] = {}
    for entry in sandbox.ledger(vendor="price_list", kind="effect"):
        if entry["method"] == method:
            done.setdefault(entry["key"], []).append(entry)
    return done


def check_writes(sandbox, query, skus, factor: Decimal) -> None:
    prices, twins = written(sandbox, "PUT"), written(sandbox, "POST")
    for done, stage in ((prices, "reprice"), (twins, "twin")):
        assert {key: len(entries) for key, entries in done.items()} == {
            str(effect_id("default", "key", stage, sku, 0)): 1 for sku in skus
        }, f"{stage}: each once"
    stored = dict(query("SELECT sku, price FROM hello_prices"))
    for (entry,) in prices.values():
        assert Decimal(entry["value"]) == round(Decimal(entry["before"]) * factor, 2) == stored[entry["ref"]]
    assert Counter(query("SELECT class, state FROM effects")) == {
        ("C2", "applied"): len(skus),
        ("C1", "applied"): len(skus),
    }
    made = {entry["ref"] for (entry,) in twins.values()}
    assert {result["sku"] for (result,) in query("SELECT result FROM items WHERE stage = 'twin'")} == made


async def test_every_price_is_raised_once_and_every_twin_created_once(start_kit, hello, sandbox, query):
    kit = await start_kit(hello)
    assert counts(await run(kit, hello, articles=40, raise_percent="12.5", twins=True)) == ("completed", 40, 40, 0, 0)
    skus = [f"SKU-{n:05d}" for n in range(1, 41)]
    check_writes(sandbox, query, skus, Decimal("1.125"))
    calls = Counter(call["method"] for call in sandbox.ledger(kind="call"))
    assert (calls["PUT"], calls["POST"]) == (40, 40)


async def test_a_price_that_is_right_already_is_not_written(start_kit, hello, sandbox, query):
    kit = await start_kit(hello)
    row = await run(kit, hello, articles=5, raise_percent="0.0001")
    assert counts(row) == ("completed", 5, 5, 0, 0)
    assert [call for call in sandbox.ledger(kind="call") if call["method"] == "PUT"] == []
    assert query("SELECT DISTINCT state, sends FROM effects") == [("applied", 0)]


async def test_an_article_that_could_not_be_read_is_not_written(start_kit, hello, sandbox, query):
    sandbox.set_faults([{"kind": "not_found", "ids": ["SKU-00002"]}, {"kind": "unauthorized", "ids": ["SKU-00003"]}])
    kit = await start_kit(hello)
    row = await run(kit, hello, articles=3, raise_percent=10, twins=True)
    assert counts(row) == ("partial", 3, 1, 1, 1)
    assert query("SELECT DISTINCT target FROM effects") == [("SKU-00001",)]


ANSWERS_LOST = {
    "applied, then 500": {"kind": "applied_then_error"},
    "applied, then reset": {"kind": "applied_then_reset"},
    "applied, invalid JSON": {"kind": "invalid_json"},
    "applied, truncated": {"kind": "truncated"},
    "applied, too slow": {"kind": "latency", "seconds": 0.5},
    "503": {"kind": "server_error", "status": 503},
    "reset": {"kind": "reset"},
    "no answer": {"kind": "timeout", "seconds": 1},
    "throttled": {"kind": "throttle", "retry_after": 0},
}


async def test_whatever_becomes_of_an_answer_each_write_is_done_once(start_kit, hello, sandbox, query):
    """An article for each way to lose an answer, when its price is set and when its twin is created."""
    skus = [f"SKU-{n:05d}" for n in range(1, len(ANSWERS_LOST) + 1)]
    keys = [str(effect_id("default", "key", "twin", sku, 0)) for sku in skus]
    sandbox.set_faults(
        [
            {**fault, "ids": [sku, key], "methods": ["PUT", "POST"], "per_id_times": 1}
            for fault, sku, key in zip(ANSWERS_LOST.values(), skus, keys, strict=True)
        ]
    )
    kit = await start_kit(patient := in_haste(5))
    row = await run(kit, patient, skus=skus, raise_percent=10, twins=True)
    assert counts(row) == ("completed", len(skus), len(skus), 0, 0)
    check_writes(sandbox, query, skus, Decimal("1.1"))
    assert query("SELECT DISTINCT effect_may_exist FROM outcomes") == [(False,)]
    hit = [call for call in sandbox.ledger(kind="call") if call["fault"] is not None]
    assert len(hit) == 2 * len(skus), "each fault did hit"


async def test_hundreds_of_writes_of_which_a_third_is_not_answered_are_each_done_once(start_kit, hello, sandbox, query):
    sandbox.set_faults([{"kind": "applied_then_error", "rate": 0.3, "methods": ["PUT", "POST"], "per_id_times": 2}])
    kit = await start_kit(patient := in_haste(12))
    row = await run(kit, patient, articles=500, raise_percent=10, twins=True)
    assert counts(row) == ("completed", 500, 500, 0, 0)
    check_writes(sandbox, query, [f"SKU-{n:05d}" for n in range(1, 501)], Decimal("1.1"))
    puts = [call for call in sandbox.ledger(vendor="price_list", kind="call") if call["method"] == "PUT"]
    assert len(puts) == 500, "found by reading, not by writing again"
    assert sum(call["fault"] is not None for call in puts) > 100, "the fault did hit"
