"""`Idempotency-Key`: however often and however simultaneously a request is repeated, it is done once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psycopg

from ecluse.access import idempotency
from tests.support.api_server import add_tenant, new_key

START = {"flow": "test", "input": {"targets": ["a"]}}


def once(client, key, body=START):
    return client.post("/api/runs", body, headers={"Idempotency-Key": key})


def test_a_repetition_gets_the_first_answer_and_starts_nothing(api, one):
    first, again = once(api, "order-1"), once(api, "order-1")
    assert (first.status, again.status) == (201, 201)
    assert first.json == again.json
    assert (first.headers["Idempotent-Replay"], again.headers["Idempotent-Replay"]) == (None, "true")
    assert one("SELECT count(*) FROM runs") == 1
    assert once(api, "order-2").json["run_id"] != first.json["run_id"]


def test_a_key_is_not_for_another_request(api, one):
    once(api, "order-1")
    other = once(api, "order-1", {"flow": "test", "input": {"targets": ["b"]}})
    assert (other.status, other.code) == (422, "IDEMPOTENCY_KEY_REUSED")
    assert one("SELECT count(*) FROM runs") == 1


def test_two_tenants_may_use_the_same_key(api, dsn, one):
    add_tenant(dsn, "rival")
    rival = api.with_key(new_key(dsn, "operator", "rival"))
    assert once(api, "order-1").json["run_id"] != once(rival, "order-1").json["run_id"]
    assert one("SELECT count(DISTINCT tenant_id) FROM runs") == 2


def test_many_at_once_start_one_run(api, one):
    with ThreadPoolExecutor(5) as together:  # fewer than there are connections: whoever finds none gets a 503
        answers = list(together.map(lambda _: once(api, "storm"), range(20)))
    assert {answer.status for answer in answers} <= {201, 409}
    assert {answer.json["run_id"] for answer in answers if answer.status == 201} == {once(api, "storm").json["run_id"]}
    assert sum(answer.headers["Idempotent-Replay"] is None for answer in answers if answer.status == 201) == 1
    assert one("SELECT count(*) FROM runs") == 1


def test_a_repetition_beside_the_first_is_told_to_come_back(api, dsn, one):
    with psycopg.connect(dsn) as first:
        first.execute(idempotency.TAKE, {"tenant": "default", "keys": ["slow"], "asked": [b""]})
        waiting = once(api, "slow")
        assert (waiting.status, waiting.code, waiting.headers["Retry-After"]) == (409, "IN_PROGRESS", "1")
        first.rollback()  # the first one died: it leaves nothing that would block the key
    assert once(api, "slow").status == 201
    assert one("SELECT count(*) FROM runs") == 1


def test_a_request_that_failed_leaves_its_key_free(api, query):
    refused = once(api, "order-1", {"flow": "test", "input": {"targets": 7}})
    assert refused.status == 422
    assert query("SELECT * FROM idempotency_keys") == []
    assert once(api, "order-1").status == 201


def test_after_a_day_the_answer_is_forgotten_and_the_run_is_still_the_same(api, query, one):
    first = once(api, "order-1")
    query("UPDATE idempotency_keys SET created_at = created_at - interval '25 hours'")
    query("UPDATE runs SET status = 'completed'")  # whatever has become of it
    again = once(api, "order-1")
    assert (again.status, again.json) == (200, {**first.json, "deduplicated": True})
    assert again.headers["Idempotent-Replay"] is None
    assert one("SELECT count(*) FROM runs") == 1
    assert query("SELECT key, created_at > now() - interval '1 hour' FROM idempotency_keys") == [("order-1", True)]


def test_after_a_day_a_key_used_for_something_else_starts_that(api, query, one):
    first = once(api, "monday")
    query("UPDATE idempotency_keys SET created_at = created_at - interval '25 hours'")
    other = once(api, "monday", {"flow": "test", "input": {"targets": ["b"]}})
    assert (other.status, other.json["deduplicated"]) == (201, False)
    assert other.json["run_id"] != first.json["run_id"]
    assert one("SELECT count(*) FROM runs") == 2


def test_a_key_that_is_not_plain_text_is_refused(api):
    for key in ("", "a b", "x" * 201, "\u00e9"):
        assert (once(api, key).status, once(api, key).code) == (422, "INVALID_INPUT")
