"""The example flow as a user runs it: real engine, real HTTP, the sandbox's ledger as the witness."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from ecluse.engine import Flow, RetryPolicy, Start
from hello_flow import FLOW
from hello_flow.flow import READ

BUDGET = 3
PATIENCE = timedelta(seconds=60)


def with_budget(executions: int) -> Flow:
    """The flow of the examples, with short pauses."""
    return replace(FLOW, stages=(replace(READ, retry=RetryPolicy(executions=executions, base=0.02)),))


@pytest.fixture
def hello(sandbox, monkeypatch) -> Flow:
    monkeypatch.setenv("PRICE_LIST_URL", f"{sandbox.url}/price-list")
    return with_budget(BUDGET)


async def run(kit, flow: Flow, **given):
    started = await kit.start_run(Start(flow, "key", input=given))
    return await kit.wait_for_run(started.run.id, PATIENCE)


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
