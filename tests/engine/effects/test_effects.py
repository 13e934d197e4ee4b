"""Writes at vendors: the intent is on record before every send, nothing is guessed, nothing is done twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any

import psycopg
import pytest
from structlog.testing import capture_logs

from ecluse.base.ids import effect_id
from ecluse.engine import Item, RetryPolicy, Start, load_run
from ecluse.engine.effects.protocol import EffectEnd, EffectState, Fenced, Intent, as_stored_json, store_effects
from ecluse.engine.lead.gate import redispatch
from ecluse.engine.model.states import RunEnd
from ecluse.engine.runs.finalize import end_runs
from ecluse.engine.work.committer import Committer
from ecluse.engine.work.verdict import ItemResult
from tests.support.engine_flows import (
    ANOTHER_CLIENTS,
    BEFORE,
    PATIENCE,
    QUIET,
    TAKE_OVER,
    WANTED,
    Board,
    Shop,
    flow,
    keys,
    open_board,
    run_to_end,
    until,
)
from tests.support.runs import start_run, wait_for_run

RETRY = RetryPolicy(executions=3, base=0.01)
ONCE = RetryPolicy(executions=1)
SHORT = {"retry": RETRY, "time_limit": timedelta(seconds=1), "poll": timedelta(milliseconds=100)}
EFFECT = "SELECT state, sends, first_send_at, last_send_at, settled_at, before, error, result FROM effects"
CLASSES = ["keyed", "absolute"]


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[Any]]:
    """Kept, not printed: a traceback with all its variables would hold the loop up for longer than a send may wait."""
    with capture_logs() as lines:
        yield lines


@pytest.fixture
def table(query):
    """Of each key: state and sends; what arrived, and was done; executions; the outcome's error; whether in doubt."""

    def ask(shop: Shop) -> dict[str, Any]:
        rows = query(
            "SELECT i.key, e.state, e.sends, i.executions, o.error_code, o.effect_may_exist FROM items i"
            " LEFT JOIN effects e ON e.item_id = i.id AND e.round = i.round"
            " JOIN outcomes o ON o.run_id = i.run_id AND o.target = i.target"
        )
        return {
            key: (state, sends, shop.arrived(key), shop.applied.count(key), executions, code, doubt)
            for key, state, sends, executions, code, doubt in rows
        }

    return ask


# ── Sends ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", CLASSES)
async def test_an_intent_is_on_record_before_every_send(start_kit, dsn, kind):
    """The vendor itself looks into our database while it is being called."""
    seen: list[Any] = []

    async def look(_: Item, call: str) -> None:
        if call == "write":
            async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
                row = await (await connection.execute(EFFECT + " WHERE last_send_at <= ecluse_now()")).fetchone()
                seen.append(row)

    shop = Shop(["500", "throttled", "applied, 500"])
    shop.watch = look
    work = getattr(shop, kind)(retry=RetryPolicy(executions=6, base=0.01))
    kit = await start_kit(f := flow(work))
    assert (await run_to_end(kit, f, ["a"]))["status"] == "completed"
    assert [(state, sends, settled) for state, sends, _, _, settled, *_ in seen] == [
        ("sending", n, None) for n in range(1, len(shop.writes) + 1)
    ]
    assert len({first for _, _, first, *_ in seen}) == 1, "the first send keeps its instant"
    instants = [last for _, _, _, last, *_ in seen]
    assert instants == sorted(set(instants)), "and each send has its own, recorded before it"
    assert shop.applied == ["a"]


ABSOLUTE = {
    # script: state, sends, writes that arrived, of them applied, executions, the item's error
    "well": ([], "applied", 1, 1, 1, 1, None),
    "as wanted already": ([], "applied", 0, 0, 0, 1, None),
    "answer lost": (["applied, 500"], "applied", 1, 1, 1, 2, None),
    "request lost": (["500"], "applied", 2, 2, 1, 2, None),
    "lost twice": (["500", "applied, 500"], "applied", 2, 2, 1, 3, None),
    "refused": (["refused"], "rejected", 1, 1, 0, 1, "REFUSED"),
    "refused later": (["500", "refused"], "rejected", 2, 2, 0, 2, "REFUSED"),
    "throttled": (["throttled"], "applied", 2, 2, 1, 2, None),
    "not sent": (["not sent", "not sent"], "applied", 3, 3, 1, 3, None),
    "another client": (["another client, 500"], "conflict", 1, 1, 0, 2, "CONFLICT"),
    "another client, while we waited": (["another client, throttled", "500"], "applied", 3, 3, 1, 3, None),
    "bug after it was applied": (["applied, bug"], "applied", 1, 1, 1, 2, None),
    "bug before": (["bug"], "applied", 2, 2, 1, 2, None),
    "too slow": (["applied, hangs"], "applied", 1, 1, 1, 2, None),
    "budget used up, not applied": (["500"] * 3, "not_applied", 3, 3, 0, 4, "NOT_APPLIED"),
    "budget used up, applied": (["500", "500", "applied, 500"], "applied", 3, 3, 1, 4, None),
    "budget used up by a bug": (["bug"] * 3, "not_applied", 3, 3, 0, 4, "NOT_APPLIED"),
    "throttled to the end": (["throttled"] * 3, "planned", 3, 3, 0, 3, "THROTTLED"),
}


async def test_an_absolute_write_is_read_back_until_it_is_certain(start_kit, table, query, one):
    shop = Shop({name: script for name, (script, *_) in ABSOLUTE.items()})
    shop.prices["as wanted already"] = "2.00"
    kit = await start_kit(f := flow(shop.absolute(**SHORT)))
    await run_to_end(kit, f, list(ABSOLUTE))
    # After a conflict nobody can tell whether ours was there before theirs.
    assert table(shop) == {name: (*expected, name == "another client") for name, (_, *expected) in ABSOLUTE.items()}
    assert shop.prices["another client"] == ANOTHER_CLIENTS, "not overwritten"
    assert set(query("SELECT before ->> 'price', key ~ '^as|while' FROM effects")) == {
        (BEFORE, False),
        (WANTED, True),
        (ANOTHER_CLIENTS, True),
    }, "as it was read before the last send"
    assert query("SELECT key FROM effects WHERE state = 'applied' AND sends > 0 AND last_send_at IS NULL") == []
    assert query("SELECT DISTINCT result FROM items WHERE status = 'succeeded'") == [({"price": "2.00"},)]
    assert ANOTHER_CLIENTS in one("SELECT reason FROM outcomes WHERE error_code = 'CONFLICT'")


@pytest.mark.parametrize("kind", CLASSES)
async def test_what_was_certainly_not_done_is_not_waited_for(start_kit, one, kind):
    shop = Shop(["throttled", "not sent"])
    kit = await start_kit(f := flow(getattr(shop, kind)(quiet=timedelta(minutes=1))))
    assert (await run_to_end(kit, f, ["a"]))["status"] == "completed"
    assert (one(EFFECT)[:2], one("SELECT executions FROM items")) == (("applied", 3), 3)


KEYED = {
    "well": ([], "applied", 1, 1, 1, 1, None),
    "answer lost": (["applied, 500"], "applied", 2, 2, 1, 2, None),
    "request lost": (["500"], "applied", 2, 2, 1, 2, None),
    "still running over there": (["applied, 500", "key in use"], "applied", 3, 3, 1, 3, None),
    "refused": (["refused"], "rejected", 1, 1, 0, 1, "REFUSED"),
    "refused, the first unresolved": (["500", "refused"], "unknown", 2, 2, 0, 2, "OUTCOME_UNKNOWN"),
    "refused, the first applied": (["applied, 500", "refused"], "unknown", 2, 2, 1, 2, "OUTCOME_UNKNOWN"),
    "throttled": (["throttled", "throttled"], "applied", 3, 3, 1, 3, None),
    "not sent": (["not sent"], "applied", 2, 2, 1, 2, None),
    "throttled, the first unresolved": (["applied, 500", "throttled"], "applied", 3, 3, 1, 3, None),
    "throttled, then lost": (["throttled", "applied, 500"], "applied", 3, 3, 1, 3, None),
    "bug after it was applied": (["applied, bug"], "applied", 2, 2, 1, 2, None),
    "too slow": (["applied, hangs"], "applied", 2, 2, 1, 2, None),
    "budget used up": (["applied, 500"] * 3, "unknown", 3, 3, 1, 3, "OUTCOME_UNKNOWN"),
    "budget used up by a bug": (["bug"] * 3, "sending", 3, 3, 0, 3, "OUTCOME_UNKNOWN"),
}


async def test_a_keyed_write_is_sent_again_under_the_same_key_and_never_guessed(start_kit, table, query):
    shop = Shop({name: script for name, (script, *_) in KEYED.items()})
    kit = await start_kit(f := flow(shop.keyed(**SHORT, rounds=1)))
    row = await run_to_end(kit, f, list(KEYED))
    in_doubt = {name for name, (_, state, *_) in KEYED.items() if state in ("unknown", "sending")}
    assert table(shop) == {name: (*expected, name in in_doubt) for name, (_, *expected) in KEYED.items()}
    assert {(key, name) for key, name, _ in shop.writes} == {
        (key, str(effect_id("default", "key", "work", key, 0))) for key in KEYED
    }, "one key per item, however often it is sent"
    assert query("SELECT DISTINCT permanent, round FROM items WHERE status = 'failed'") == [(True, 0)], "no new round"
    stored = dict(
        query("SELECT i.key, i.result FROM items i JOIN effects e ON e.item_id = i.id AND e.result = i.result")
    )
    made = {one["id"].rsplit("-", 1)[0]: one for one in shop.made.values()}
    assert stored == {key: made[key] for key, status in query("SELECT key, status FROM items") if status == "succeeded"}
    assert row["successful"] == sum(code is None for *_, code in KEYED.values())
    for name in ("answer lost", "still running over there", "throttled, the first unresolved"):
        times = [at for key, _, at in shop.writes if key == name]
        assert min(later - earlier for earlier, later in pairwise(times)) >= QUIET.total_seconds()


@pytest.mark.parametrize("kind", CLASSES)
async def test_whoever_takes_over_waits_for_the_quiet_period_since_the_last_send(start_kit, query, one, kind):
    """The second send arrives late, its caller is gone. Counted from the first send, the quiet period is over."""
    shop = Shop(["500", "arrives late, hangs"])
    kit = await start_kit(f := flow(getattr(shop, kind)()))
    started = await start_run(kit, Start(f, "key", input={"targets": ["a"]}))
    await until(lambda: len(shop.writes) == 2)
    await asyncio.to_thread(query, TAKE_OVER)
    row = await wait_for_run(kit, started.run.id, PATIENCE)
    assert (row["status"], shop.applied) == ("completed", ["a"])
    state, _, first, last, settled, *_ = one(EFFECT)
    assert state == "applied"
    assert last - first >= QUIET
    if kind == "absolute":
        assert (len(shop.writes), settled - last >= QUIET) == (2, True), "found by reading, not by writing again"
    else:
        times = [at for _, _, at in shop.writes]
        assert times[2] - times[1] >= QUIET.total_seconds()
    await kit.stop(grace=0.05)


async def test_a_conditional_write_that_met_somebody_is_a_conflict_unless_it_met_itself(start_kit, table):
    shop = Shop({"met": ["another client"], "itself": ["500", "the one before arrives"]}, conditional=True)
    kit = await start_kit(f := flow(shop.absolute()))
    await run_to_end(kit, f, ["met", "itself"])
    assert table(shop) == {
        "met": ("conflict", 1, 1, 0, 2, "CONFLICT", True),
        "itself": ("applied", 2, 2, 1, 3, None, False),
    }
    assert shop.prices["met"] == ANOTHER_CLIENTS


# ── Rounds and results ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", CLASSES)
async def test_a_further_round_is_a_new_wish_under_a_new_key(start_kit, query, kind):
    shop = Shop({"later": ["throttled"], "in doubt": ["applied, 500"], "done": []})
    work = getattr(shop, kind)(**{**SHORT, "retry": ONCE, "rounds": 1})
    kit = await start_kit(f := flow(work))
    await run_to_end(kit, f, ["later", "in doubt", "done"])
    assert sorted(shop.applied) == ["done", "in doubt", "later"], "each once"
    assert {(key, round_, id_) for key, round_, id_ in query("SELECT key, round, id FROM effects")} == {
        (key, round_, effect_id("default", "key", "work", key, round_))
        for key, round_ in [("later", 0), ("later", 1), ("in doubt", 0), ("done", 0)]
    }
    assert [key for key, *_ in shop.writes].count("in doubt") == 1


@pytest.mark.parametrize("kind", CLASSES)
async def test_the_result_is_saved_once_in_the_commit_that_settles_the_effect(start_kit, dsn, one, kind):
    saved: list[Any] = []

    async def save(connection, results) -> None:
        state = "SELECT state FROM effects"
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as outside:
            inside = await (await connection.execute(state)).fetchone()
            saved.extend([inside[0], (await (await outside.execute(state)).fetchone())[0]])
        saved.extend(one.result for one in results)

    shop = Shop(["applied, 500"])
    kit = await start_kit(f := flow(getattr(shop, kind)(save=save)))
    assert (await run_to_end(kit, f, ["a"]))["status"] == "completed"
    answer = {"price": "2.00"} if kind == "absolute" else {"id": "a-0", "price": "2.00"}
    assert saved == ["applied", "unknown" if kind == "absolute" else "sending", answer]
    assert one("SELECT result FROM items") == answer


@pytest.mark.parametrize("kind", CLASSES)
async def test_a_result_that_is_not_stored_was_applied_all_the_same(start_kit, query, kind):
    async def save(_, results) -> None:
        if any(one.item.key == "t00003" for one in results):
            raise KeyError("colour")

    shop = Shop()
    kit = await start_kit(f := flow(getattr(shop, kind)(save=save)))
    row = await run_to_end(kit, f, keys(10))
    assert (row["successful"], row["failed"], kit.broken.is_set()) == (9, 1, False)
    assert query("SELECT target, error_code FROM outcomes WHERE outcome = 'failed'") == [("t00003", "STORE_FAILED")]
    assert query("SELECT state, count(*) FROM effects GROUP BY 1") == [("applied", 10)]
    assert sorted(shop.applied) == keys(10)


UNSTORABLE = {"a NUL byte": "a\x00b", "half a character": "a\ud800b"}


@pytest.mark.parametrize("bad", UNSTORABLE.values(), ids=UNSTORABLE)
async def test_an_answer_that_cannot_be_stored_is_that_item_s_failure_and_nobody_else_s(start_kit, query, bad):
    async def answer(_context, item: Item, _order) -> Any:
        return {"note": bad if item.key == "t00003" else "fine"}

    work = Shop().keyed(max_wait=timedelta(seconds=3))
    kit = await start_kit(f := flow(replace(work, work=replace(work.work, send=answer))))
    row = await run_to_end(kit, f, keys(10))
    assert (row["successful"], row["failed"], kit.broken.is_set()) == (9, 1, False)
    assert query("SELECT target, error_code FROM outcomes WHERE outcome = 'failed'") == [("t00003", "STORE_FAILED")]
    assert query("SELECT state, count(*) FROM effects GROUP BY 1") == [("applied", 10)], "the vendor did it"


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("bad", UNSTORABLE.values(), ids=UNSTORABLE)
async def test_a_wish_that_cannot_be_recorded_is_not_sent(start_kit, query, bad, kind):
    def wanted(item: Item) -> Any:
        return {"price": bad if item.key == "t00003" else WANTED}

    shop = Shop()
    work = getattr(shop, kind)()
    kit = await start_kit(f := flow(replace(work, work=replace(work.work, wanted=wanted))))
    row = await run_to_end(kit, f, keys(10))
    assert (row["successful"], row["failed"], kit.broken.is_set()) == (9, 1, False)
    assert sorted(shop.applied) == [key for key in keys(10) if key != "t00003"]
    ((target, reason),) = query("SELECT target, reason FROM outcomes WHERE outcome = 'failed'")
    assert target == "t00003"
    assert any(word in reason for word in ("could not be recorded", "surrogate")), reason


# ── The commit of an intent ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", CLASSES)
async def test_an_intent_whose_commit_was_not_answered_is_sent_once_and_counted_once(start_kit, monkeypatch, one, kind):
    """The database has it, we do not know: the batch is stored again, and its own intent is recognised."""
    shop = Shop()
    kit = await start_kit(f := flow(getattr(shop, kind)(quiet=timedelta(seconds=5))))
    store, answers_lost = kit.worker.committer._store_together, []

    async def store_and_lose_the_answer(batch) -> None:
        intents = [each for each in batch if isinstance(each, Intent)]
        if not intents or answers_lost:
            return await store(batch)
        answers_lost.append(len(intents))
        await store([replace(each, answer=asyncio.Future()) for each in intents])
        raise psycopg.OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(kit.worker.committer, "_store_together", store_and_lose_the_answer)
    assert (await run_to_end(kit, f, ["a"]))["status"] == "completed"
    assert (answers_lost, shop.applied, len(shop.writes)) == ([1], ["a"], 1)
    assert one(EFFECT)[:2] == ("applied", 1)


@pytest.fixture
async def board(dsn):
    async with open_board(dsn) as board:
        yield board


async def one_in_hand(board: Board, work: Any) -> Intent:
    lane = await board.lane()
    run = await board.run(["a"], one=work)
    async with board.pool.connection() as connection:
        await connection.execute("UPDATE runs SET selected = 1, orchestrated = false")
        await connection.execute("INSERT INTO outcomes (run_id, target) VALUES (%s, 'a')", (run.id,))
    (taken,) = await board.claim(free=[lane])
    name = effect_id("default", run.event_key, "work", "a", 0)
    return Intent(taken, name, work.work, {"price": WANTED}, {"price": BEFORE})


async def test_an_intent_that_is_stored_twice_was_sent_by_nobody_else(board, one):
    intent = await one_in_hand(board, Shop().absolute(quiet=timedelta(seconds=20)))
    committer = Committer(board.pool, "one")
    for answer in (intent.answer, asyncio.Future()):
        await committer._store_together([replace(intent, answer=answer)])
        recorded = await answer
        assert (recorded.went, recorded.state, recorded.sends) == (True, "sending", 1)
    stranger = replace(intent, answer=asyncio.Future())
    one("UPDATE effects SET claim_id = claim_id + 1 RETURNING id")
    await committer._store_together([stranger])
    assert not (await stranger.answer).went, "another claim's intent: it may be on its way"


REFUSES = {
    "the fence has moved": "UPDATE claims SET fence = fence + 1",
    "the item is somebody else's": "UPDATE items SET claim_id = claim_id + 1",
    "the item is waiting again": "UPDATE items SET claim_id = NULL",
    "the item is finished": "UPDATE items SET status = 'failed', finished_at = now()",
    "we were declared dead": "UPDATE replicas SET state = 'dead'",
}


@pytest.mark.req("ENG-25")
@pytest.mark.parametrize("why", REFUSES.values(), ids=REFUSES)
async def test_each_guard_alone_keeps_an_intent_from_being_recorded(board, query, why):
    intent = await one_in_hand(board, Shop().absolute())
    query(why)
    await Committer(board.pool, "one")._store_together([intent])
    with pytest.raises(Fenced):
        await intent.answer
    assert query("SELECT 1 FROM effects") == []


async def test_a_further_send_is_recorded_only_after_the_quiet_period_and_only_once(board, query, one):
    first = await one_in_hand(board, Shop().absolute(quiet=timedelta(seconds=20)))
    committer = Committer(board.pool, "one")
    await committer._store_together([first])
    query(TAKE_OVER)
    (taken,) = await board.claim(free=[1])

    async def again() -> EffectState:
        intent = replace(first, claimed=taken, again_after=1, answer=asyncio.Future())
        await committer._store_together([intent])
        return await intent.answer

    assert not (await again()).went, "too early"
    query("UPDATE effects SET last_send_at = last_send_at - interval '21 s'")
    assert ((await again()).went, one(EFFECT)[1]) == (True, 2)
    assert ((await again()).went, one(EFFECT)[1]) == (True, 2), "the same one, its answer lost"
    one("UPDATE effects SET claim_id = 0, last_send_at = last_send_at - interval '21 s' RETURNING id")
    assert not (await again()).went, "somebody has sent it since: it is to be asked about first"


async def test_no_further_round_is_opened_while_a_write_is_in_doubt(board, query):
    """However its item came to fail: a round is a new wish, and the vendor might do both."""
    intent = await one_in_hand(board, work := Shop().keyed(rounds=2))
    committer = Committer(board.pool, "one")
    await committer._store_together([intent])
    item, claim_id, fence, *_ = intent.claimed
    await committer._store_together(
        [ItemResult(item, work, claim_id, fence, "failed", error_code="TIMEOUT", error="slow")]
    )
    async with board.pool.connection() as connection:
        run = await load_run(connection, item.run_id)
        assert await redispatch(connection, run, work, 1) == 0
        query("UPDATE effects SET state = 'not_applied', settled_at = now()")
        assert await redispatch(connection, run, work, 2) == 1


async def test_what_is_known_about_an_earlier_send_says_nothing_about_the_last(board, one):
    intent = await one_in_hand(board, Shop().keyed())
    await Committer(board.pool, "one")._store_together([intent])
    one("UPDATE effects SET sends = 2 RETURNING id")
    async with board.pool.connection() as connection:
        for sends, state in [(1, "sending"), (3, "sending"), (2, "planned")]:
            await store_effects(connection, [EffectEnd(intent.id, sends, "planned")], "one")
            assert one(EFFECT)[0] == state
        await store_effects(connection, [EffectEnd(intent.id, 2, "applied")], "one")
    assert one(EFFECT)[0] == "planned", "settled is settled"


async def test_of_two_holders_whose_intents_meet_in_one_commit_only_the_successor_sends(board, query):
    """A claim was taken over and the same process got the item again, while its first execution was still under way."""
    intent = await one_in_hand(board, Shop().absolute())
    query(TAKE_OVER)
    (taken,) = await board.claim(free=[1])
    successor = replace(intent, claimed=taken, answer=asyncio.Future())
    await Committer(board.pool, "one")._store_together([intent, successor])
    assert (await successor.answer).went
    with pytest.raises(Fenced):
        await intent.answer


async def test_of_two_holders_whose_results_meet_in_one_commit_only_the_successor_s_is_saved(board, query):
    saved: list[Any] = []

    async def save(_, results) -> None:
        saved.extend(one.result for one in results)

    zombie = (await one_in_hand(board, work := Shop().keyed(save=save))).claimed
    query(TAKE_OVER)
    (successor,) = await board.claim(free=[1])
    finishes = [
        ItemResult(taken.item, work, taken.claim_id, taken.fence, "succeeded", result=name)
        for taken, name in [(zombie, "of the zombie"), (successor, "of the successor")]
    ]
    await Committer(board.pool, "one")._store_together(finishes)
    assert (saved, query("SELECT result FROM items")) == (["of the successor"], [("of the successor",)])


async def test_an_intent_repeated_after_the_quiet_period_is_not_sent_as_if_it_were_new(board):
    """The database was away for longer than the quiet period: who sends now, on the strength of an intent that old, is
    not covered by it. A successor would look, see nothing, and send again or report it as not applied."""
    intent = await one_in_hand(board, Shop().absolute())
    committer = Committer(board.pool, "one")
    await committer._store_together([intent])
    await asyncio.sleep(QUIET.total_seconds() + 0.1)
    again = replace(intent, answer=asyncio.Future())
    await committer._store_together([again])
    recorded = await again.answer
    assert not (recorded.went and recorded.quiet_over), "sent now, though the quiet period of this send is over"


async def test_a_run_cannot_end_between_an_intent_and_its_commit(board, dsn, one):
    """Else a write would go out for a run that has ended, and no outcome would say that it may exist."""
    intent = await one_in_hand(board, work := Shop().absolute())
    committer = Committer(board.pool, "one")

    async def end_it() -> int:
        async with board.pool.connection() as connection:
            run = await load_run(connection, intent.claimed.item.run_id)
            return await end_runs(connection, flow(work), [run], RunEnd("operator", reason="enough", by="me"))

    async with await psycopg.AsyncConnection.connect(dsn) as slow:
        await slow.execute("LOCK TABLE effects IN EXCLUSIVE MODE")  # may be read: the end would not wait for this
        recording = asyncio.create_task(committer._store_together([intent]))
        await asyncio.sleep(0.2)
        ending = asyncio.create_task(end_it())
        await asyncio.wait([ending], timeout=0.3)
        assert not ending.done(), "the claim was not locked"
        await slow.rollback()
    await recording
    assert await ending
    assert (await intent.answer).went
    assert one("SELECT effect_may_exist FROM outcomes"), "the intent was there first"


async def test_values_are_compared_as_postgres_gives_them_back(one):
    """What is read now is compared with what was stored then: a number that comes back otherwise is a conflict."""
    values = [0.1, 1e16, -0.0, 2**53 + 1, 10**30, 1e-300, 12.50, "é\u2028", [], {"a": [None, True, {}]}]
    stored = one("SELECT %s::jsonb", psycopg.types.json.Jsonb(values))
    assert stored == [as_stored_json(value) for value in values]
