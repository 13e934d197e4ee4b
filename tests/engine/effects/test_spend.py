"""The spend guard: cost is reserved before a call and settled with its result, and beyond a budget calls wait."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from decimal import Decimal

import pytest

from ecluse.base.errors import Conflict, InvalidInput, NotFound, PermanentError, TransientError
from ecluse.db.query import fetch_column
from ecluse.engine import (
    Budget,
    Charge,
    Done,
    Flow,
    Lane,
    NewItem,
    NewSchedule,
    Start,
    create_schedule,
    delete_budget,
    require_budget,
    set_budget,
)
from ecluse.engine.effects import budgets, reservations
from ecluse.engine.effects.reservations import PaidCallRequest
from ecluse.engine.model.budget import Settlement
from ecluse.engine.work.claim import Claimant, claim_items
from ecluse.insight.waiting import why_run
from ecluse.verify import audit
from tests.support.engine_flows import NO_SHARE, PATIENCE, Targets, flow, stage
from tests.support.runs import end_run, start_items, start_run, wait_for_run

PRICE = Decimal("0.3")
TOTALS = """
SELECT scope, period, trim_scale(spent)::text, trim_scale(reserved)::text, used_up FROM spend_totals ORDER BY 1, 2
"""


def paying(cost=PRICE, most=PRICE, called=None):
    async def work(context, item):
        await context.pay(item, charge=Charge("llm", "m", most))
        if called is not None:
            called.append(item.key)
        return Done(cost=cost)

    return work


def only_items(work, **options):
    one = stage(work, paid=True, lane=Lane("paid", max_in_flight=1), **options)
    return one, Flow("test", (one,), None, Targets)


async def put(kit, amount, period="day", scope="tenant", subject=0, tenant="default"):
    async with kit.pool.connection() as connection, connection.transaction():
        return await set_budget(connection, Budget(tenant, scope, subject, period, Decimal(amount)))


async def begin(kit, one, f, count, name="r", **options):
    items = [NewItem(f"{name}{n}") for n in range(count)]
    return (await start_items(kit, Start(f, name, **options), one, items)).run.id


async def why(kit, run_id):
    async with kit.pool.connection() as connection:
        return await why_run(connection, "default", run_id)


async def until(true, seconds=20.0):
    async with asyncio.timeout(seconds):
        while not (found := await true()):
            await asyncio.sleep(0.02)
    return found


async def waits(kit, run_id, count):
    async def looks():
        told = await why(kit, run_id)
        return told if told.waiting == count and not told.in_flight and told.groups[0].cause == "budget" else None

    return await until(looks)


def clean(dsn):
    report = audit(dsn, None)
    assert report.violations == [], report.text()
    assert report.checked["I-22"] > 0


async def test_beyond_the_budget_calls_wait_with_the_reason_and_continue_when_it_is_raised(start_kit, query, dsn):
    called: list[str] = []
    one, f = only_items(paying(called=called))
    kit = await start_kit(f)
    await put(kit, "1")
    run = await begin(kit, one, f, 5)
    told = await waits(kit, run, 2)
    assert len(called) == 3
    assert told.blocked
    (group,) = told.groups
    assert (
        "the day's budget of tenant default has 0.1 left, too little for this call"
        " (0.9 of 1 spent, 0 reserved; this call may cost 0.3)" in told.summary
    )
    assert "or when it is raised" in group.detail
    assert group.first_at is not None
    assert (group.first_at.hour, group.first_at.minute) == (0, 0)
    assert query(TOTALS) == [
        ("run", "all", "0.9", "0", False),
        ("tenant", "day", "0.9", "0", True),
        ("tenant", "month", "0.9", "0", False),
    ]
    clean(dsn)
    await put(kit, "1.5")
    ended = await wait_for_run(kit, run, PATIENCE)
    assert (ended["status"], ended["successful"]) == ("completed", 5)
    assert (ended["cost"], ended["cost_reserved"]) == (Decimal("1.5"), None)
    clean(dsn)


async def test_a_call_that_waits_names_all_budgets_without_room_and_what_of_them_is_of_unknown_cost(start_kit, query):
    """The vendor broke down after each call was sent: nothing is known to have been spent."""

    async def work(context, item):
        await context.pay(item, charge=Charge("llm", "m", PRICE))
        raise TransientError("500", code="SERVER_ERROR")

    one, f = only_items(work, retry=stage().retry.__class__(executions=1))
    kit = await start_kit(f)
    await put(kit, "0.6")
    await put(kit, "0.7", "month")
    run = await begin(kit, one, f, 4)
    told = await waits(kit, run, 2)
    figures = "spent, 0.6 of it by calls whose cost is unknown, 0 reserved"
    for said in ("month's budget of tenant default has 0.1 left", "day's budget of tenant default is used up"):
        assert said in told.summary
    assert f"(0.6 of 0.7 {figures}; this call may cost 0.3)" in told.summary
    assert f"(0.6 of 0.6 {figures})" in told.summary
    ((waiting,),) = query("SELECT count(DISTINCT postponed_why) FROM items WHERE postponed_cause = 'budget'")
    assert waiting == 1
    assert query("SELECT period, unknown::text FROM budget_list ORDER BY 1") == [("day", "0.6"), ("month", "0.6")]
    async with kit.pool.connection() as connection:
        with pytest.raises(Conflict) as refused:
            await require_budget(connection, f, "default")
    assert f"day's budget of tenant default is used up: 0.6 of 0.6 {figures.partition(', 0 ')[0]}" in str(refused.value)


async def test_the_next_day_work_continues_by_itself_and_the_month_goes_on_counting(start_kit, query, dsn):
    one, f = only_items(paying(), max_wait=timedelta(days=3))
    kit = await start_kit(f, sweep_every=0.2)
    await put(kit, "0.6")
    await put(kit, "100", "month")
    run = await begin(kit, one, f, 3)
    await waits(kit, run, 1)
    now = query("SELECT ecluse_now()")[0][0]
    midnight = (now + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
    query('UPDATE clock_offset SET "offset" = %s', midnight - now + timedelta(seconds=1))
    query("SELECT pg_notify('ecluse_clock', '')")
    assert (await wait_for_run(kit, run, PATIENCE))["successful"] == 3
    assert query("SELECT count(*) FROM spend_totals WHERE scope = 'tenant' AND period = 'day'") == [(2,)]
    clean(dsn)


async def test_a_deleted_budget_does_not_hold_calls_any_more(start_kit):
    one, f = only_items(paying())
    kit = await start_kit(f)
    budget = await put(kit, "0")
    run = await begin(kit, one, f, 2)
    await waits(kit, run, 2)
    async with kit.pool.connection() as connection, connection.transaction():
        await delete_budget(connection, "default", budget)
    assert (await wait_for_run(kit, run, PATIENCE))["successful"] == 2


async def test_a_run_whose_budget_cannot_suffice_ends_and_says_so(start_kit, query):
    one = stage(
        paying(),
        paid=True,
        lane=Lane("paid", max_in_flight=1),
        max_wait=timedelta(seconds=1.5),
        poll=timedelta(seconds=0.2),
    )
    kit = await start_kit(f := flow(one))
    await put(kit, "0.4")
    run = (await start_run(kit, Start(f, "r", input={"targets": ["a", "b", "c"]}))).run.id
    ended = await wait_for_run(kit, run, PATIENCE)
    assert (ended["status"], ended["successful"], ended["failed"]) == ("partial", 1, 2)
    assert ended["outcomes"] == {"successful": 1, "BUDGET_EXCEEDED": 2}
    ((reason,),) = query("SELECT DISTINCT reason FROM outcomes WHERE outcome = 'failed'")
    assert "the day's budget of tenant default has 0.1 left, too little for this call" in reason


async def test_a_call_that_was_not_made_costs_nothing_and_a_doubtful_one_what_was_reserved(start_kit, query, dsn):
    async def work(context, item):
        await context.pay(item, charge=Charge("llm", "m", PRICE))
        if item.key.endswith("0"):
            raise PermanentError("refused", code="REFUSED")
        if item.key.endswith("1"):
            raise TransientError("no answer", code="TIMEOUT")
        if item.key.endswith("2"):
            raise ValueError("a bug after the call")
        broken = PermanentError("of no use", code="REFUSED")
        broken.cost = Decimal("0.07")
        raise broken

    one, f = only_items(work, retry=stage().retry.__class__(executions=1))
    kit = await start_kit(f)
    run = await begin(kit, one, f, 4)
    ended = await wait_for_run(kit, run, PATIENCE)
    assert (ended["cost"], ended["cost_unknown"]) == (Decimal("0.67"), Decimal("0.6"))
    assert query("SELECT state, trim_scale(coalesce(cost, reserved))::text FROM paid_calls ORDER BY 1, 2") == [
        ("settled", "0.07"),
        ("unknown", "0.3"),
        ("unknown", "0.3"),
    ]
    assert query(TOTALS)[0] == ("run", "all", "0.67", "0", False)
    clean(dsn)


async def test_a_call_in_flight_when_its_run_ends_is_settled_with_its_cost(start_kit, query, dsn):
    asked, answer = asyncio.Event(), asyncio.Event()

    async def work(context, item):
        await context.pay(item, charge=Charge("llm", "m", PRICE))
        asked.set()
        await answer.wait()
        return Done(cost=Decimal("0.1"))

    one, f = only_items(work)
    kit = await start_kit(f, sweep_every=0.1)
    run = await begin(kit, one, f, 1)
    await asyncio.wait_for(asked.wait(), 10)
    await end_run(kit, run, "enough")
    states = "SELECT state, trim_scale(cost)::text FROM paid_calls"

    async def doubted():
        return query(states) == [("unknown", None)]

    await until(doubted)
    answer.set()

    async def settled():
        return query(states) == [("settled", "0.1")]

    await until(settled)
    clean(dsn)


async def claim(connection, count):
    await connection.execute("INSERT INTO replicas (id, host, pid) VALUES ('one', 'here', 1) ON CONFLICT DO NOTHING")
    lanes = await fetch_column(connection, "SELECT id FROM lanes")
    return await claim_items(connection, Claimant("one", ["test/work"], [1]), lanes, count, capped=False, left=NO_SHARE)


async def claimed_items(kit, one, f, count, name="r"):
    """Items of a run, in the hands of a replica that is not there."""
    await begin(kit, one, f, count, name)
    async with kit.pool.connection() as connection:
        return await claim(connection, count)


@pytest.fixture
async def idle(start_kit):
    """A kit that works on nothing, and a stage whose items only the test claims."""
    one, f = only_items(paying())
    kit = await start_kit(f, roles=frozenset({"api"}))
    return kit, one, f


async def test_two_replicas_at_once_never_reserve_more_than_the_budget(idle, query, dsn):
    kit, one, f = idle
    await put(kit, "7.5")
    held = await claimed_items(kit, one, f, 60)
    wanted = [PaidCallRequest(claimed, Charge("llm", "m", PRICE)) for claimed in held]

    async def replica(mine):
        refused = 0
        for n in range(0, len(mine), 3):
            async with kit.pool.connection() as connection:
                found = await reservations.reserve(connection, mine[n : n + 3])
            refused += sum(over is not None for over in found.values())
        return refused

    refused = await asyncio.gather(*(replica(wanted[n::4]) for n in range(4)))
    assert sum(refused) == 60 - 25
    assert query("SELECT trim_scale(spent + reserved)::text FROM spend_totals") == [("7.5",)] * 3
    clean(dsn)


async def test_what_a_dead_worker_had_reserved_is_kept_apart_and_counted_once(idle, query, dsn):
    kit, one, f = idle
    (first,) = await claimed_items(kit, one, f, 1)
    charge = Charge("llm", "m", PRICE)
    async with kit.pool.connection() as connection:
        await reservations.reserve(connection, [PaidCallRequest(first, charge)])
        await reservations.settle_abandoned(kit.pool)
        assert query("SELECT state FROM paid_calls") == [("reserved",)]  # in hand
        await connection.execute("UPDATE items SET claim_id = NULL")  # taken over
        await connection.execute("UPDATE claims SET released = released + in_flight, fence = fence + 1")
        (second,) = await claim(connection, 1)
        await reservations.settle_abandoned(kit.pool)
        await reservations.reserve(connection, [PaidCallRequest(second, charge)])
        assert query("SELECT state FROM paid_calls ORDER BY claim_id") == [("unknown",), ("reserved",)]
        assert query(TOTALS)[0] == ("run", "all", "0.3", "0.3", False)
        for _ in range(2):  # a commit whose answer was lost is repeated
            await reservations.settle_costs(connection, {second.claim_key: Settlement("settled", Decimal("0.2"))})
        assert query(TOTALS)[0] == ("run", "all", "0.5", "0", False)
        # It came after all.
        await reservations.settle_costs(connection, {first.claim_key: Settlement("settled", Decimal("0.25"))})
        assert query(TOTALS)[0] == ("run", "all", "0.45", "0", False)


async def test_calls_of_started_runs_count_for_the_run_that_started_them_and_its_schedule(idle, query):
    kit, one, f = idle
    run = await begin(kit, one, f, 0, "parent")
    async with kit.pool.connection() as connection:
        schedule = await create_schedule(connection, NewSchedule(flow(stage()), "s", cron="0 6 * * *"))
    query("UPDATE runs SET schedule_id = %s", schedule)
    await begin(kit, one, f, 1, "child", parent_run_id=run)
    await put(kit, "0.5", scope="schedule", subject=schedule)
    await put(kit, "0.5", "all", "run", run)
    async with kit.pool.connection() as connection:
        held = await claim(connection, 1)
        await reservations.reserve(connection, [PaidCallRequest(one, Charge("llm", "m", PRICE)) for one in held])
    reserved = query("SELECT scope, subject_id FROM spend_totals WHERE reserved > 0 AND period IN ('day', 'all')")
    assert sorted(reserved) == [("run", run), ("schedule", schedule), ("tenant", 0)]
    ((child,),) = query("SELECT id FROM runs WHERE event_key = 'child'")
    with pytest.raises(InvalidInput, match=f"was started by run {run}: set the budget of that run"):
        await put(kit, "1", "all", "run", child)


async def test_a_start_that_a_caller_waits_for_is_refused_while_a_budget_is_used_up(idle, query):
    kit, one, f = idle
    await put(kit, "0.5", "month")
    held = await claimed_items(kit, one, f, 2)
    async with kit.pool.connection() as connection:
        await require_budget(connection, f, "default")
        for claimed in held:
            await reservations.reserve(connection, [PaidCallRequest(claimed, Charge("llm", "m", Decimal("0.46")))])
            await reservations.settle_costs(connection, {claimed.claim_key: Settlement("settled", Decimal("0.46"))})
        with pytest.raises(
            Conflict, match=r"month's budget of tenant default has 0.04 left, .* 0.46 of 0.5"
        ) as refused:
            await require_budget(connection, f, "default")
        assert refused.value.code == "BUDGET_EXCEEDED"
        await require_budget(connection, f, "other")
        await require_budget(connection, flow(stage()), "default")  # pays for nothing
    await put(kit, "2", "month")
    async with kit.pool.connection() as connection:
        await require_budget(connection, f, "default")


async def test_a_budget_below_what_is_spent_or_of_another_tenant_is_refused(idle, query):
    kit, one, f = idle
    (claimed,) = await claimed_items(kit, one, f, 1)
    async with kit.pool.connection() as connection:
        await reservations.reserve(connection, [PaidCallRequest(claimed, Charge("llm", "m", PRICE))])
    with pytest.raises(Conflict, match=r"0 is spent and 0.3 reserved") as refused:
        await put(kit, "0.2")
    assert refused.value.code == "BUDGET_BELOW_SPENT"
    with pytest.raises(NotFound):
        await put(kit, "1", "all", "run", claimed.item.run_id, tenant="other")
    with pytest.raises(NotFound):
        await put(kit, "1", scope="schedule", subject=99)
    assert query("SELECT count(*) FROM budgets") == [(0,)]


async def test_a_change_of_a_budget_wakes_waiting_calls_in_its_own_transaction(idle, query):
    kit, one, f = idle
    await begin(kit, one, f, 1)
    for amount in ("1", "2"):
        query("UPDATE items SET postponed_cause = 'budget', postponed_why = 'x', due_at = ecluse_now() + '1 hour'")
        await put(kit, amount)
        assert query("SELECT postponed_cause, due_at <= ecluse_now() FROM items") == [(None, True)]


async def test_a_call_that_was_refused_right_before_a_raise_is_woken_all_the_same(idle, query):
    kit, one, f = idle
    await put(kit, "1")
    await begin(kit, one, f, 1)
    # As the commit of a call that was refused before, and is stored after.
    query("UPDATE items SET postponed_cause = 'budget', postponed_why = 'x', due_at = ecluse_now() + interval '1 hour'")
    await budgets.wake_after_changes(kit.pool)
    assert query("SELECT postponed_cause, due_at <= ecluse_now() FROM items") == [(None, True)]


async def test_calls_that_wait_for_those_in_flight_are_woken_when_there_is_room(start_kit, query):
    """Long before they are tried again by themselves."""
    first, answer = [], asyncio.Event()

    async def work(context, item):
        await context.pay(item, charge=Charge("llm", "m", PRICE))
        first.append(item.key)
        await answer.wait()
        return Done(cost=Decimal("0.05"))

    one = stage(work, paid=True, lane=Lane("paid"))
    kit = await start_kit(f := Flow("test", (one,), None, Targets), sweep_every=60.0)
    await put(kit, "0.6")
    run = await begin(kit, one, f, 6)

    async def held():
        found = await why(kit, run)
        return found if found.waiting == 4 and found.groups[0].cause == "budget" else None

    waiting = await until(held)
    assert "calls in flight held the rest of the day's budget of tenant default (0 of 0.6 spent" in waiting.summary
    assert query("SELECT trim_scale(awaited)::text FROM spend_totals WHERE period = 'day'") == [("0.3",)]
    answer.set()
    ended = await wait_for_run(kit, run, timedelta(seconds=6))
    assert (ended["status"], ended["successful"], ended["cost"]) == ("completed", 6, Decimal("0.3"))
    assert query("SELECT count(awaited) FROM spend_totals") == [(0,)]


async def test_a_total_that_calls_in_flight_still_hold_or_have_used_up_wakes_calls_only_once(idle, query):
    kit, one, f = idle
    await put(kit, "0.6")
    first, second, third = await claimed_items(kit, one, f, 3)
    charge = Charge("llm", "m", PRICE)
    async with kit.pool.connection() as connection:
        await reservations.reserve(connection, [PaidCallRequest(each, charge) for each in (first, second, third)])
        query(
            "UPDATE items SET claim_id = NULL, postponed_cause = 'budget', postponed_why = 'x', due_at = ecluse_now()"
        )
        await budgets.wake_after_calls(kit.pool)
        assert query("SELECT count(postponed_cause) FROM items") == [(3,)]
        for each in (first, second):  # for all that was reserved: nothing is left
            await reservations.settle_costs(connection, {each.claim_key: Settlement("settled")})
        await budgets.wake_after_calls(kit.pool)
        assert query("SELECT count(postponed_cause) FROM items") == [(0,)]
        query("UPDATE items SET postponed_cause = 'budget', postponed_why = 'x'")
        await budgets.wake_after_calls(kit.pool)
        assert query("SELECT count(postponed_cause) FROM items") == [(3,)]


async def test_of_several_refused_calls_a_total_keeps_the_least_that_one_may_cost(idle, query):
    kit, one, f = idle
    await put(kit, "0.6")
    held = await claimed_items(kit, one, f, 5)
    least = "SELECT trim_scale(awaited)::text FROM spend_totals WHERE period = 'day'"
    async with kit.pool.connection() as connection:

        async def reserve(*costs):
            wanted = [
                PaidCallRequest(each, Charge("llm", "m", Decimal(cost)))
                for each, cost in zip(held, costs, strict=False)
            ]
            await reservations.reserve(connection, wanted)

        await reserve("0.55", "0.3", "0.2", "0.1")
        assert query(least) == [("0.1",)]
        held = held[4:]
        await reserve("0.4")
        assert query(least) == [("0.1",)]
