"""Pusher's HTTP API: what is refused, and what it says about channels."""

from __future__ import annotations

import json
import time
from urllib.parse import urlencode

import psycopg
import pytest

from ecluse.realtime.pusher_signatures import signed_query
from tests.realtime.conftest import app_of, secret_of
from tests.support.api_server import FLOW, add_tenant, new_key, serving
from tests.support.waits import wait_for


def asking(live):
    """Sends requests signed with the app of the tenant of this client's key."""
    tenant = live.get("/api/me").json["tenant_id"]
    app, secret = app_of(live), secret_of(live, tenant)

    def send(path, body=None, *, app_id=app["app_id"], key=app["key"], secret=secret, raw=None):
        full = f"/apps/{app_id}{path}"
        sent = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
        method = "GET" if body is None and raw is None else "POST"
        query = urlencode(signed_query(key, secret, method, full, sent, time.time()))
        return live.with_key(None).ask(method, f"{full}?{query}", raw=sent or None)

    return send


@pytest.fixture(scope="module")
def ask(live):
    return asking(live)


GOOD = {"name": "x.y", "data": "{}", "channel": "private-fiche-601"}


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, 200),
        ({"name": "n" * 200}, 200),
        ({"name": "n" * 201}, 400),
        ({"name": ""}, 400),
        ({"name": "a\nb"}, 400),
        ({"name": "pusher:error"}, 400),
        ({"data": "x" * 10_240}, 200),
        ({"data": "x" * 10_241}, 413),
        ({"data": "é" * 5_121}, 413),
        ({"data": {"an": "object"}}, 400),
        ({"channel": "a b"}, 400),
        ({"channel": None}, 400),
        ({"channel": None, "channels": [f"c{n}" for n in range(100)]}, 200),
        ({"channel": None, "channels": [f"c{n}" for n in range(101)]}, 400),
        ({"channels": []}, 400),
        ({"socket_id": "1.2"}, 200),
        ({"socket_id": "one"}, 400),
    ],
    ids=lambda value: str(value)[:60],
)
def test_an_event_that_cannot_be_sent_is_refused(ask, change, status):
    body = {name: value for name, value in (GOOD | change).items() if value is not None}
    answer = ask("/events", body)
    assert answer.status == status, answer.body
    if status != 200:
        assert answer.code


@pytest.mark.parametrize("raw", [b"nonsense", b"[]", b"\xff", b"null", b"[" * 10_000])
def test_a_body_that_is_no_event_is_refused(ask, raw):
    assert ask("/events", raw=raw).status == 400


def test_a_batch_has_ten_events_at_most_and_all_of_them_are_good_or_none_is_sent(ask, live, stream):
    one = stream(live, "private-fiche-602")
    good = {"name": "x.y", "data": '{"n":1}', "channel": "private-fiche-602"}
    assert ask("/batch_events", {"batch": [good] * 11}).status == 400
    assert ask("/batch_events", {"batch": [good, GOOD | {"channel": "a b"}]}).status == 400
    assert ask("/batch_events", {"batch": [good | {"data": "no json"}]}).json == {}
    assert one.next()["payload"] == "no json"


def test_who_does_not_sign_with_the_secret_of_that_app_is_refused(ask, live, rival):
    assert ask("/events", GOOD, secret="wrong").status == 401  # noqa: S106
    assert ask("/events", GOOD, key="wrong").status == 401
    theirs = app_of(rival)
    assert ask("/events", GOOD, app_id=theirs["app_id"]).status == 401
    assert ask("/events", GOOD, app_id="999999").status == 401
    assert ask("/events", GOOD, app_id="one").status == 404
    assert ask("/channels", secret="wrong").status == 401  # noqa: S106
    signed = {"app_id": theirs["app_id"], "key": theirs["key"], "secret": secret_of(live, "rival")}
    wait_for(lambda: ask("/channels", **signed).json == {"channels": {}})  # once the last to listen has gone


def test_an_answer_with_info_counts_the_listeners_of_all_replicas(ask, live, replica, rival, stream):
    for server in (live, replica, rival):
        stream(server, "private-fiche-603")
    wanted = {"channels": {"private-fiche-603": {"subscription_count": 2}}}
    wait_for(
        lambda: ask("/events", GOOD | {"channel": "private-fiche-603", "info": "subscription_count"}).json == wanted
    )
    batch = {"batch": [GOOD | {"channel": "private-fiche-603", "info": "subscription_count"}, GOOD]}
    assert ask("/batch_events", batch).json == {"batch": [{"subscription_count": 2}, {}]}


@pytest.mark.req("ENG-88", "ENG-102")
def test_a_new_secret_is_shown_once_and_the_old_one_signs_no_more(live, live_dsn, ask):
    add_tenant(live_dsn, "rotating")
    operator, admin = (live.with_key(new_key(live_dsn, role, "rotating")) for role in ("operator", "admin"))
    app, old = app_of(operator), secret_of(live, "rotating")
    assert (operator.post("/api/realtime/rotate").status, secret_of(live, "rotating")) == (403, old)
    first, again = (admin.post("/api/realtime/rotate", headers={"Idempotency-Key": "once"}) for _ in range(2))
    assert (first.json["app_id"], first.json["key"]) == (app["app_id"], app["key"]), "clients need no change"
    assert first.json["secret"] == secret_of(live, "rotating") != old
    assert again.json == {**first.json, "secret": None}
    signed = {"app_id": app["app_id"], "key": app["key"]}
    wait_for(lambda: ask("/events", GOOD, **signed, secret=first.json["secret"]).status == 200)
    assert ask("/events", GOOD, **signed, secret=old).status == 401
    with psycopg.connect(live_dsn) as connection:
        trail = connection.execute("SELECT action, subject FROM audit_trail WHERE tenant_id = 'rotating'").fetchall()
    assert trail == [("realtime.rotate", f"realtime:{app['app_id']}")]


def refusal(answer):
    (about,) = answer.json["error"]["details"]
    assert 1 <= int(answer.headers["Retry-After"]) <= 60
    return answer.status, answer.code, about["where"]


def test_what_an_app_sends_counts_for_the_limits_of_its_tenant_and_of_no_other(dsn):
    add_tenant(dsn, "rival")
    with serving(dsn, FLOW, ECLUSE_LIMIT_TENANT_REQUESTS=60) as client:
        keys = [client.with_key(new_key(dsn, tenant=tenant)) for tenant in ("default", "rival")]
        mine, theirs = map(asking, keys)
        answers = [mine("/events", GOOD) for _ in range(13)]
        assert [one.status for one in answers[:10]] == [200] * 10  # 5 units each, as any change
        assert refusal(answers[-1]) == (429, "RATE_LIMITED", "tenant_requests")
        for path, body in (("/batch_events", {"batch": [GOOD]}), ("/channels", None), ("/channels/x", None)):
            while (answer := mine(path, body)).status == 200:  # a read fits in where a change does not
                assert body is None
            assert refusal(answer) == (429, "RATE_LIMITED", "tenant_requests")
        assert refusal(keys[0].get("/api/me"))[2] == "tenant_requests"
        assert theirs("/events", GOOD).status == 200


def test_the_bytes_that_an_app_sends_count(dsn):
    with serving(dsn, FLOW, ECLUSE_LIMIT_KEY_MEGABYTES=1) as client:
        ask = asking(client.with_key(new_key(dsn)))
        assert {ask("/events", raw=b"x" * 700_000).status for _ in range(2)} == {400}
        assert refusal(ask("/events", GOOD)) == (429, "RATE_LIMITED", "key_megabytes")
