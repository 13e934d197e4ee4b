"""Applies: exactly the plan, each price once; retries, rounds, and what is never sent."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from ecluse.base.errors import Conflict, ForbiddenTransition, NotFound
from tests.support.pricing_world import PATIENCE

PRODUCTS = [f"gid://shopify/Product/{n}" for n in range(1, 9)]
VARIANT = "gid://shopify/ProductVariant/{}{:02}"
MUTATIONS = {"vendor": "shopify", "ids": PRODUCTS}  # a call that reads prices of several variants has no record


def some(products: int) -> dict[str, Any]:
    return {
        "selection": {"products": PRODUCTS[:products], "tags": ["first-50"]},
        "change": {"kind": "percent", "percent": "-10"},
    }


@pytest.fixture
async def previewed(shop, connection):
    async def make(products: int = 2, **config: Any) -> Any:
        world = await shop(**config)
        return world, await world.previewed(connection, await world.project(connection), some(products))

    return make


async def until(condition):
    async with asyncio.timeout(PATIENCE.total_seconds()):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.02)


def keys(query, kind="automation.target.apply"):
    return [key for (key,) in query("SELECT event_key FROM events_outbox WHERE event_type = %s ORDER BY id", kind)]


@pytest.mark.req("PRC-04", "PRC-05", "PRC-18", "PRC-19", "PRC-57", "PRC-58", "PRC-74")
async def test_the_plan_is_applied_exactly_each_price_once(previewed, connection, query):
    world, run = await previewed()
    done = await world.applied(connection, run)
    assert (done["status"], done["counts"]) == ("APPLIED", {"APPLIED": 20})
    assert set(world.writes().values()) == {1}
    assert await world.prices(run) == [after for (after,) in world.targets(run, "after_amount")]
    calls = [one for one in world.sandbox.ledger(kind="call") if one["ref"] in PRODUCTS]
    assert len(calls) == 2  # all variants of a product in one call
    ids = [one for (one,) in world.targets(run, "id")]
    assert sorted(keys(query)) == sorted(f"{run['id']}:{one}:apply:0" for one in ids)
    payloads = query(
        "SELECT tenant_id, payload ->> 'runId', payload ->> 'targetId' FROM events_outbox"
        " WHERE event_type = 'automation.target.apply'"
    )
    assert set(payloads) == {("default", str(run["id"]), str(one)) for one in ids}
    moves = query("SELECT from_status, to_status, actor FROM rule_history WHERE rule_target_id IS NULL ORDER BY id")
    assert moves == [
        (None, "PREVIEW", "key 7"),
        ("PREVIEW", "QUEUED", "key 7"),
        ("QUEUED", "APPLYING", "Worker"),
        ("APPLYING", "APPLIED", "Worker"),
    ]
    assert {one for (one,) in query("SELECT DISTINCT correlation_id FROM rule_history")} == {"request-1"}


async def test_only_the_chosen_targets_are_applied_and_queueing_twice_is_refused(previewed, connection):
    world, run = await previewed(1)
    chosen = [one for (one,) in world.targets(run, "id")][:3]
    done = await world.applied(connection, run, chosen)
    assert (done["status"], done["counts"]) == ("APPLIED", {"APPLIED": 3, "PREVIEW": 7})
    assert sum(world.writes().values()) == 3
    with pytest.raises(ForbiddenTransition):
        await world.queued(connection, run)


@pytest.mark.req("PRC-20", "PRC-65", "PRC-57")
async def test_a_refused_call_is_retried_and_each_attempt_has_its_own_event(previewed, connection, query):
    world, run = await previewed(1)
    world.sandbox.set_faults([{**MUTATIONS, "kind": "server_error", "times": 2}])
    done = await world.applied(connection, run)
    assert done["status"] == "APPLIED"
    assert world.targets(run, "attempts, error_code") == [(2, None)] * 10
    first = world.targets(run, "id")[0][0]
    mine = [key for key in keys(query) if key.split(":")[1] == str(first)]
    assert mine == [f"{run['id']}:{first}:apply:{n}" for n in range(3)]
    assert set(world.writes().values()) == {1}


@pytest.mark.req("PRC-20", "PRC-21")
async def test_the_reading_after_a_last_send_in_doubt_is_no_retry(previewed, connection):
    world, run = await previewed(1)
    world.sandbox.set_faults([{**MUTATIONS, "kind": "reset"}])
    done = await world.applied(connection, run)
    assert (done["status"], done["errors"]) == ("FAILED", {"NOT_APPLIED": 10})
    assert set(world.targets(run, "attempts")) == {(3,)}
    assert done["executions"][0]["error"].startswith("NOT_APPLIED (10 times): Sent, ")


@pytest.mark.req("PRC-60")
async def test_a_last_send_that_was_applied_without_an_answer_is_found_applied(previewed, connection):
    world, run = await previewed(1)
    refusals = {**MUTATIONS, "kind": "refused", "code": "x", "status": 503, "times": 3}
    world.sandbox.set_faults([refusals, {**MUTATIONS, "kind": "applied_then_reset", "after": 3, "times": 1}])
    done = await world.applied(connection, run)
    assert (done["status"], done["counts"]) == ("APPLIED", {"APPLIED": 10})
    assert set(world.writes().values()) == {1}


async def test_a_target_whose_time_is_over_while_its_write_is_in_doubt_is_unknown(previewed, connection):
    world, run = await previewed(1, target=timedelta(seconds=0), quiet=timedelta(hours=1))
    world.sandbox.set_faults([{**MUTATIONS, "kind": "applied_then_reset", "times": 1}])
    started = await world.queued(connection, run)
    await until(lambda: world.targets(run, "attempts")[0] == (1,))
    await world.made.flow.watch(connection)
    done = await world.over(connection, run, started)
    assert (done["status"], done["errors"]) == ("FAILED", {"OUTCOME_UNKNOWN": 10})


@pytest.mark.req("PRC-06", "PRC-08", "PRC-21", "PRC-22", "PRC-36", "PRC-44", "PRC-48", "PRC-49", "PRC-59", "PRC-50")
async def test_after_three_retries_a_target_fails_and_the_next_round_applies_it(previewed, connection, query):
    world, run = await previewed()
    world.sandbox.set_faults([{**MUTATIONS, "ids": PRODUCTS[:1], "kind": "refused", "code": "x", "status": 503}])
    done = await world.applied(connection, run)
    assert (done["status"], done["counts"]) == ("PARTIAL", {"APPLIED": 10, "FAILED": 10})
    assert len([one for one in world.sandbox.ledger(kind="call") if one["ref"] == PRODUCTS[0]]) == 4
    good, bad = (world.targets(run, f"id, status = '{status}'") for status in ("APPLIED", "FAILED"))
    applied = next(one for one, is_it in good if is_it)
    failed = [one for one, is_it in bad if is_it]
    with pytest.raises(ForbiddenTransition):
        await world.retried(connection, run, [failed[0], applied])
    with pytest.raises(NotFound):
        await world.retried(connection, run, [failed[0], 10**9])
    world.sandbox.set_faults([])
    again = await world.retried(connection, run, failed[:1])
    assert (again["status"], again["round"], again["counts"]) == ("PARTIAL", 1, {"APPLIED": 11, "FAILED": 9})
    again = await world.retried(connection, run)
    assert (again["status"], again["round"]) == ("APPLIED", 2)
    assert f"{run['id']}:{failed[0]}:apply:0:r1" in keys(query)
    assert set(world.writes().values()) == {1}
    assert [(one["kind"], one["number"]) for one in again["executions"]] == [
        ("apply", 2),
        ("apply", 1),
        ("apply", 0),
        ("preview", 0),
    ]


@pytest.mark.req("PRC-60")
@pytest.mark.parametrize("fault", [{"kind": "applied_then_error"}, {"kind": "applied_then_reset"}])
async def test_a_price_whose_answer_was_lost_is_read_before_it_is_sent_again(previewed, connection, fault):
    world, run = await previewed(1)
    world.sandbox.set_faults([{**MUTATIONS, "times": 1, **fault}])
    done = await world.applied(connection, run)
    assert done["counts"] == {"APPLIED": 10}
    assert set(world.writes().values()) == {1}


async def test_a_price_that_another_party_has_changed_is_not_overwritten(previewed, connection):
    world, run = await previewed(1)
    ((variant,), *_) = world.targets(run, "variant_id")
    async with world.client() as client:
        await client.set_prices(PRODUCTS[0], {variant: 4_242}, key="other")
    done = await world.applied(connection, run)
    assert (done["status"], done["errors"]) == ("PARTIAL", {"PRICE_CONFLICT": 1})
    assert (await world.prices(run))[0] == 4_242
    assert world.writes()[variant] == 1  # the other party's


@pytest.mark.req("PRC-07", "PRC-44")
async def test_a_shop_that_refuses_everything_ends_the_execution_and_the_rest_is_not_sent(previewed, connection):
    world, run = await previewed(8, per_second=3.0, burst=1)
    world.sandbox.set_faults([{**MUTATIONS, "kind": "unauthorized", "after": 1}])
    done = await world.applied(connection, run)
    assert done["status"] == "PARTIAL"
    assert done["errors"]["NOT_ATTEMPTED"] >= 10
    assert set(done["errors"]) == {"NOT_ATTEMPTED", "UNAUTHORIZED"}
    assert "UNAUTHORIZED" in done["stopped_reason"]
    assert done["counts"] == {"APPLIED": 10, "FAILED": 70}
    attempts = world.query(
        "SELECT count(*) FROM rule_history"
        " WHERE from_status = 'QUEUED' AND to_status = 'APPLYING' AND rule_target_id IS NOT NULL"
    )
    assert attempts == [(80,)]  # a target that was never sent goes through APPLYING as well


@pytest.mark.req("PRC-39", "PRC-40", "PRC-42")
async def test_the_sixth_429_in_a_row_pauses_the_lane(previewed, connection, query):
    world, run = await previewed(8)
    world.sandbox.set_faults([{**MUTATIONS, "kind": "throttle", "retry_after": None, "times": 6}])
    done = await world.applied(connection, run)
    assert done["counts"] == {"APPLIED": 80}
    assert set(world.writes().values()) == {1}
    assert query("SELECT count(*) > 0 FROM run_log WHERE message LIKE '%%Circuit breaker triggered%%'") == [(True,)]


async def test_the_first_targets_are_applied_alone_and_stop_the_others_if_they_fail(previewed, connection):
    world, run = await previewed(3)
    world.sandbox.set_faults([{**MUTATIONS, "ids": PRODUCTS[:1], "kind": "refused", "code": "x", "status": 422}])
    done = await world.applied(connection, run, canary=4)
    assert (done["status"], done["counts"]) == ("FAILED", {"FAILED": 30})
    assert done["errors"]["NOT_ATTEMPTED"] == 26
    assert "first 4 targets" in done["stopped_reason"]
    assert world.writes() == {}
    world.sandbox.set_faults([])
    assert (await world.retried(connection, run))["status"] == "APPLIED"


async def test_a_good_canary_is_followed_by_the_others(previewed, connection):
    world, run = await previewed(3)
    done = await world.applied(connection, run, canary=4)
    assert (done["status"], set(world.writes().values())) == ("APPLIED", {1})
    calls = [one["ref"] for one in world.sandbox.ledger(kind="call") if one["ref"] in PRODUCTS]
    assert (calls[0], len(calls)) == (PRODUCTS[0], 4)


async def test_once_too_many_have_failed_nothing_more_is_sent(previewed, connection):
    world, run = await previewed(8, per_second=3.0, burst=1)
    world.sandbox.set_faults([{**MUTATIONS, "kind": "refused", "code": "x", "status": 422}])
    done = await world.applied(connection, run, max_failure_rate=0.2)
    assert done["status"] == "FAILED"
    assert done["errors"]["NOT_ATTEMPTED"] >= 30
    assert "targets failed" in done["stopped_reason"]
    assert len([one for one in world.sandbox.ledger(kind="call") if one["ref"] in PRODUCTS]) <= 4


async def test_an_operators_end_leaves_a_status_by_the_counts(previewed, connection):
    world, run = await previewed(8, per_second=4.0, burst=4)
    started = await world.queued(connection, run)
    await until(lambda: ("APPLIED",) in world.targets(run))
    done = await world.ended_by_operator(connection, run, started)
    assert done["status"] == "PARTIAL"
    assert done["counts"]["APPLIED"] + done["counts"]["FAILED"] == 80
    assert set(done["errors"]) <= {"NOT_ATTEMPTED", "OUTCOME_UNKNOWN"}


@pytest.mark.req("PRC-45")
async def test_the_whole_time_of_a_target_is_limited(previewed, connection):
    world, run = await previewed(1, target=timedelta(seconds=0.1))
    world.sandbox.set_faults([{**MUTATIONS, "kind": "throttle", "retry_after": 300}])
    started = await world.queued(connection, run)
    await until(lambda: world.targets(run, "attempts")[0] == (1,))
    await asyncio.sleep(0.1)
    await world.made.flow.watch(connection)
    done = await world.over(connection, run, started)
    assert (done["status"], done["errors"]) == ("FAILED", {"TARGET_TIMEOUT": 10})


@pytest.mark.req("PRC-10", "PRC-23", "PRC-75")
async def test_a_rollback_restores_the_former_prices(previewed, connection, query):
    world, run = await previewed()
    await world.applied(connection, run)
    done = await world.rolled_back(connection, run)
    assert (done["status"], done["counts"]) == ("ROLLED_BACK", {"ROLLED_BACK": 20})
    assert await world.prices(run) == [before for (before,) in world.targets(run, "before_amount")]
    assert set(world.writes().values()) == {2}
    assert f"{run['id']}:{world.targets(run, 'id')[0][0]}:rollback:0" in keys(query, "automation.target.rollback")


@pytest.mark.req("PRC-15", "PRC-75")
async def test_a_rollback_leaves_what_was_changed_since_unless_it_is_forced(previewed, connection):
    world, run = await previewed(1)
    await world.applied(connection, run)
    target, variant = world.targets(run, "id, variant_id")[0]
    async with world.client() as client:
        await client.set_prices(PRODUCTS[0], {variant: 4_242}, key="other")
    done = await world.rolled_back(connection, run)
    assert (done["status"], done["counts"], done["not_rolled_back"]) == ("APPLIED", {"APPLIED": 1, "ROLLED_BACK": 9}, 1)
    assert (await world.prices(run))[0] == 4_242
    assert world.targets(run, "rollback_error_code")[0] == ("PRICE_CONFLICT",)
    done = await world.rolled_back(connection, run, [target], forced=True)
    assert (done["status"], done["not_rolled_back"]) == ("ROLLED_BACK", 0)


async def test_a_shop_that_refuses_everything_ends_a_rollback_too(previewed, connection):
    world, run = await previewed(8, per_second=3.0, burst=1)
    await world.applied(connection, run)
    world.sandbox.set_faults([{**MUTATIONS, "kind": "unauthorized", "after": 1}])
    done = await world.rolled_back(connection, run)
    assert (done["status"], done["counts"]) == ("APPLIED", {"APPLIED": 70, "ROLLED_BACK": 10})
    assert done["not_rolled_back"] == 70
    why = [code for status, code in world.targets(run, "status, rollback_error_code") if status == "APPLIED"]
    assert set(why) == {"NOT_ATTEMPTED", "UNAUTHORIZED"}
    assert why.count("NOT_ATTEMPTED") >= 10
    assert "UNAUTHORIZED" in dict(world.targets(run, "rollback_error_code, rollback_error"))["NOT_ATTEMPTED"]


async def test_a_failed_run_and_a_run_under_way_are_not_rolled_back(previewed, connection):
    world, run = await previewed(1)
    world.sandbox.set_faults([{**MUTATIONS, "kind": "refused", "code": "x", "status": 422}])
    assert (await world.applied(connection, run))["status"] == "FAILED"
    with pytest.raises(ForbiddenTransition):
        await world.rolled_back(connection, run)
    world.sandbox.set_faults([])
    await world.retried(connection, run)
    world.sandbox.set_faults([{**MUTATIONS, "kind": "throttle", "retry_after": 1, "times": 1}])
    first = asyncio.create_task(world.rolled_back(connection, run))
    await until(lambda: len([one for one in world.sandbox.ledger(kind="call") if one["status"] == 429]) == 1)
    async with world.kit.pool.connection() as other:
        with pytest.raises(Conflict, match="under way"):
            await world.rolled_back(other, run)
        with pytest.raises(Conflict, match="under way"):
            await world.retried(other, run)
    assert (await asyncio.wait_for(first, PATIENCE.total_seconds()))["status"] == "ROLLED_BACK"
