"""Audits by hand as a user sees them: real engine, real HTTP, the sandbox's ledger as the witness."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from decimal import Decimal

import pytest

from ecluse.engine import pause_lane, resume_lane
from ecluse.engine.model.retry import backoff
from ecluse.flows.audits import configs, prompts
from ecluse.flows.audits.flow import Audit, Config
from ecluse.flows.audits.transcripts import TRANSCRIPTS as READ
from ecluse.flows.audits.transcripts import Recording
from ecluse.vendors.llm import Price, Prices
from tests.support.audit_world import SAID, STEPS, by_hand
from tests.support.runs import end_run
from tests.support.transcription_world import until

TOO_LONG = "TRANSCRIPT_TOO_LONG"


@pytest.mark.req("G-91", "G-40", "AUT-55")
async def test_one_call_answers_all_steps_of_a_config_for_a_fiche(auditing, one):
    w = await auditing(vendor={"prices": Prices(other=Price(Decimal(1_000_000), Decimal(2_000_000)))})
    number = await w.fiche("1000", SAID, ("Et la cotisation ?", "Trente euros par mois."))
    config = await w.config()
    run = await w.audit("1000", config, use_rlm=True)
    assert (run["status"], run["selected"], run["successful"]) == ("completed", 1, 1)
    assert w.calls() == w.paid() == [f"audit-{run['id']}-audit-1000-{config.id}"]
    row = one(
        "SELECT tenant_id, run_id, fiche_cache_id, fiche_id, audit_config_id, config_version, automation_run_id,"
        " automation_schedule_id, trigger_source, use_rlm, is_latest, status, error_code, model FROM audits"
    )
    about = ("default", run["id"], number, "1000", config.id, 1, None, None, "api", True)
    assert row == (*about, True, "completed", None, "gpt-4.1")
    steps = one("SELECT result -> 'steps' FROM audits")
    assert [(step["name"], step["max"], step["weight"]) for step in steps] == [("Consent", 10, 3), ("Price", 5, 1)]
    assert all(0 <= step["score"] <= step["max"] and step["comment"] for step in steps)
    score, tokens_in, tokens_out, cost, known = one(
        "SELECT score, input_tokens, output_tokens, cost, created_at <= started_at AND started_at <= finished_at"
        " FROM audits"
    )
    assert float(score) == round((3 * steps[0]["score"] / 10 + steps[1]["score"] / 5) * 25, 2)
    assert cost == tokens_in + 2 * tokens_out > 0
    assert known
    assert one("SELECT result FROM items") == {"audit_id": one("SELECT id::text FROM audits"), "score": float(score)}


@pytest.mark.req("G-91")
async def test_every_quote_is_searched_for_and_one_that_is_not_found_is_marked(auditing, query):
    w = await auditing()
    first, second = SAID, ("La cotisation serait de trente euros par mois.", "C'est entendu, envoyez le dossier.")
    texts = {f"{n}-{k}": " ".join(said) for n in range(20) for k, said in ((1, first), (2, second))}
    config = await w.config()
    for n in range(20):
        await w.fiche(str(n), first, second)
    runs = [await w.start(fiche_id=str(n), audit_config_id=str(config.id)) for n in range(20)]
    await asyncio.gather(*(w.ended(run) for run in runs))
    quotes = [quote for (quote,) in query("SELECT jsonb_path_query(result, '$.steps[*].evidence[*]') FROM audits")]
    found = [one for one in quotes if one["verified"]]
    missing = [one for one in quotes if not one["verified"]]
    assert found
    assert missing, "the model invents one in eight"
    for one in found:
        assert texts[one["call_id"]][one["position"] :].startswith(one["quote"])
    for one in missing:
        assert (one["call_id"], one["position"]) == (None, None)
        assert not any(one["quote"] in text for text in texts.values())
    assert {one["call_id"].rpartition("-")[2] for one in found} == {"1", "2"}


@pytest.mark.req("G-91")
async def test_what_is_sent_is_every_transcript_in_the_order_of_the_calls_and_nothing_that_is_gone(auditing, query):
    w = await auditing()
    number = await w.fiche("1000", ("the first",), ("the second",), (), ("gone",))
    query("UPDATE recordings SET start_time = '2026-03-01' WHERE call_id = '1000-2'")
    query("UPDATE recordings SET removed_at = ecluse_now() WHERE call_id = '1000-4'")
    query(
        "DELETE FROM recording_transcription_chunks c USING recordings r"
        " WHERE c.recording_id = r.id AND r.call_id = '1000-1'"
    )
    query("UPDATE recordings SET transcription_text = 'the first, without chunks' WHERE call_id = '1000-1'")
    async with w.kit.pool.connection() as connection:
        rows = await (await connection.execute(READ, ([number],))).fetchall()
    assert prompts.transcript([Recording(*row[1:]) for row in rows]) == (
        "# Recording 1000-2, 2026-03-01 00:00\nspeaker_0: the second\n\n"
        "# Recording 1000-1, 2026-03-02 09:00\nthe first, without chunks"
    )


@pytest.mark.req("G-91")
@pytest.mark.parametrize(
    ("said", "code"),
    [((), "NO_TRANSCRIPT"), (((),), "NO_TRANSCRIPT"), (((" ",),), "NO_TRANSCRIPT"), ((("ah " * 400,),), TOO_LONG)],
    ids=["no recording", "not written down", "blank", "too long"],
)
async def test_without_a_transcript_or_with_too_long_a_one_it_fails_without_a_call(auditing, one, said, code):
    w = await auditing(max_input_chars=1_000)
    await w.fiche("1000", *said)
    run = await w.audit("1000", await w.config())
    assert (run["status"], run["failed"], w.calls()) == ("failed", 1, [])
    assert one("SELECT status, error_code, is_latest, finished_at IS NOT NULL, score FROM audits") == (
        "failed", code, True, True, None,
    )  # fmt: skip
    assert "1000" in one("SELECT error FROM audits")


FAULTS = [
    ({"kind": "chat_length"}, 3, "TRUNCATED"),
    ({"kind": "chat_empty"}, 3, "EMPTY_ANSWER"),
    ({"kind": "chat_broken"}, 3, "SCHEMA_BROKEN"),
    ({"kind": "server_error"}, 3, "VENDOR_ERROR_503"),
    ({"kind": "server_error", "status": 408}, 3, "VENDOR_ERROR_408"),
    ({"kind": "throttle", "retry_after": None}, 3, "THROTTLED"),
    ({"kind": "chat_refusal"}, 1, "REFUSED"),
    ({"kind": "chat_filtered"}, 1, "CONTENT_FILTERED"),
    ({"kind": "unauthorized"}, 1, "UNAUTHORIZED"),
    ({"kind": "refused", "status": 429, "code": "insufficient_quota"}, 1, "QUOTA_EXCEEDED"),
]


@pytest.mark.req("G-83")
async def test_what_may_heal_is_tried_three_times_and_the_rest_once(auditing, sandbox, query):
    w = await auditing()
    config = await w.config()
    fiches = [str(1000 + n) for n, _ in enumerate(FAULTS)]
    for fiche in fiches:
        await w.fiche(fiche, SAID)
    async with w.kit.pool.connection() as connection:
        await pause_lane(connection, "llm", reason="a test", by="test")
        runs = [await w.start(fiche_id=fiche, audit_config_id=str(config.id)) for fiche in fiches]
        names = [f"audit-{run}-audit-{fiche}-{config.id}" for run, fiche in zip(runs, fiches, strict=True)]
        rules = [{**fault, "vendor": "llm", "ids": [name]} for (fault, *_), name in zip(FAULTS, names, strict=True)]
        sandbox.set_faults(rules)
        await resume_lane(connection, "llm", reason="a test", by="test")
    ends = await asyncio.gather(*(w.ended(run) for run in runs))
    assert {end["status"] for end in ends} == {"failed"}
    made = Counter(w.calls())
    codes = dict(query("SELECT run_id, error_code FROM audits WHERE status = 'failed'"))
    outcomes = dict(query("SELECT run_id, error_code FROM outcomes WHERE outcome = 'failed'"))
    assert [(made[name], codes[run], outcomes[run]) for name, run in zip(names, runs, strict=True)] == [
        (calls, code, code) for _, calls, code in FAULTS
    ]


@pytest.mark.req("G-83")
def test_calls_are_three_and_a_second_and_four_seconds_apart():
    retry = Audit(Config(), lambda _: None).stage.retry
    assert retry.executions == 3
    assert [backoff(retry, n, random.Random(1)) for n in (1, 2)] == [1, 4]  # noqa: S311


@pytest.mark.req("G-80")
async def test_an_answer_that_got_lost_is_asked_for_again_and_counted_as_maybe_paid(auditing, sandbox, one):
    w = await auditing()
    await w.fiche("1000", SAID)
    sandbox.set_faults([{"kind": "applied_then_reset", "vendor": "llm", "times": 1}])
    assert (await w.audit("1000", await w.config()))["status"] == "completed"
    assert len(w.paid()) == 2
    assert one("SELECT maybe_paid, ambiguous FROM attempts") == (True, True)


@pytest.mark.req("G-80", "G-82", "G-92")
async def test_what_was_paid_for_is_kept_although_its_run_was_ended(auditing, sandbox, query):
    made, answered, release = by_hand(sandbox), asyncio.Event(), asyncio.Event()

    async def held(context, item):
        result = await made.stage.work(context, item)
        answered.set()
        await release.wait()
        return result

    w = await auditing(replace(made.flow, stages=(replace(made.stage, work=held),)))
    await w.fiche("1000", SAID)
    config = await w.config()
    run_id = await w.start(fiche_id="1000", audit_config_id=str(config.id))
    async with asyncio.timeout(60):
        await answered.wait()
    await end_run(w.kit, run_id, "enough")
    assert query("SELECT status, error_code, is_latest FROM audits") == [("failed", "RUN_ENDED", True)]
    release.set()
    await until(lambda: query("SELECT 1 FROM audits WHERE status = 'completed' AND is_latest AND error IS NULL"))
    assert query("SELECT outcome, error_code FROM outcomes") == [("failed", "CANCELLED")]


@pytest.mark.req("AUT-55")
async def test_the_latest_of_a_fiche_and_config_is_the_one_that_ended_last(auditing, sandbox, query):
    w = await auditing()
    await w.fiche("1000", SAID)
    config, other = await w.config(), await w.config(name="Other")
    latest = "SELECT run_id, status FROM audits WHERE is_latest AND audit_config_id = %s"
    first = await w.audit("1000", config)
    await w.audit("1000", other)
    assert query(latest, config.id) == [(first["id"], "completed")]
    second = await w.audit("1000", config)
    assert query(latest, config.id) == [(second["id"], "completed")]
    sandbox.set_faults([{"kind": "chat_refusal", "vendor": "llm"}])
    third = await w.audit("1000", config)
    assert query(latest, config.id) == [(third["id"], "failed")]
    assert len(query(latest, other.id)) == 1
    assert query("SELECT count(*) FROM audits") == [(4,)]


@pytest.mark.req("AUT-55")
async def test_many_of_one_fiche_and_config_at_once_leave_one_latest(auditing, query):
    w = await auditing()
    await w.fiche("1000", SAID)
    config = await w.config()
    runs = [await w.start(fiche_id="1000", audit_config_id=str(config.id)) for _ in range(30)]
    ends = await asyncio.gather(*(w.ended(run) for run in runs))
    assert {end["status"] for end in ends} == {"completed"}
    assert query("SELECT count(*), count(*) FILTER (WHERE is_latest) FROM audits") == [(30, 1)]


async def test_subscribers_get_each_end_and_find_it_in_the_table(auditing, sandbox, one):
    w = await auditing()
    await w.fiche("1000", SAID)
    config = await w.config()
    good = await w.audit("1000", config)
    sandbox.set_faults([{"kind": "chat_refusal", "vendor": "llm"}])
    bad = await w.audit("1000", config)
    await until(lambda: len(w.lives) == 2)
    about = {"fiche_id": "1000", "audit_config_id": str(config.id)}
    (completed,), (failed,) = w.emitted("completed"), w.emitted("failed")
    score = float(one("SELECT score FROM audits WHERE run_id = %s", good["id"]))
    ids = {run: one("SELECT id::text FROM audits WHERE run_id = %s", run) for run in (good["id"], bad["id"])}
    assert completed == {**about, "audit_id": ids[good["id"]], "run_id": str(good["id"]), "score": score}
    assert failed.pop("error").startswith("llm: gpt-4.1 refused")
    assert failed == {**about, "audit_id": ids[bad["id"]], "run_id": str(bad["id"]), "error_code": "REFUSED"}


@pytest.mark.parametrize(("key", "model", "knob"), [(None, "m", "LLM_API_KEY"), ("k", None, "LLM_MODEL")])
async def test_without_a_key_or_a_model_it_fails_at_once_and_names_the_knob(auditing, one, key, model, knob):
    w = await auditing(vendor={"llm_key": key, "llm_model": model})
    await w.fiche("1000", SAID)
    assert (await w.audit("1000", await w.config()))["status"] == "failed"
    code, error = one("SELECT error_code, error FROM audits")
    assert (code, knob in error, w.calls()) == ("NOT_CONFIGURED", True, [])


async def test_a_config_may_name_its_own_model_and_an_audit_keeps_the_version_it_was_made_with(auditing, one):
    w = await auditing(concurrency=1)
    await w.fiche("1000", SAID)
    config = await w.config(model="mini")
    async with w.kit.pool.connection() as connection:
        await pause_lane(connection, "llm", reason="a test", by="test")
        run_id = await w.start(fiche_id="1000", audit_config_id=str(config.id))
        async with connection.transaction():
            await configs.update(connection, "default", config.id, {"steps": STEPS[:1], "model": None})
        await resume_lane(connection, "llm", reason="a test", by="test")
    await w.ended(run_id)
    stored = one("SELECT config_version, model, jsonb_array_length(result -> 'steps') FROM audits")
    assert stored == (1, "mini", 2)
    second = await w.audit("1000", config)
    assert one(
        "SELECT config_version, model, jsonb_array_length(result -> 'steps') FROM audits WHERE run_id = %s",
        second["id"],
    ) == (2, "gpt-4.1", 1)
