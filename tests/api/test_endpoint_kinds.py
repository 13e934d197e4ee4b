"""Endpoints of Slack and PagerDuty over HTTP: guarded URLs, secrets that are sealed and never answered."""

from __future__ import annotations

import pytest

from tests.support.databases import everything_stored

PATH = "/api/notifications/endpoints"
KEY = "0123456789abcdef0123456789abcdef"
SLACK = {"kind": "slack", "url": "https://93.184.216.34/services/T0/B0/hunter2", "events": ["pricing.alert.*"]}
PAGERDUTY = {"kind": "pagerduty", "routing_key": KEY, "events": ["pricing.alert.critical.*"]}


def test_their_secrets_are_sealed_never_shown_and_deleted_with_them(api, dsn, query, capsys):
    slack, pagerduty = api.post(PATH, SLACK), api.post(PATH, PAGERDUTY)
    assert (slack.status, slack.json["url"], slack.json["secret"]) == (201, "https://93.184.216.34/…", None)
    assert (pagerduty.status, pagerduty.json["secret"]) == (201, None)
    assert pagerduty.json["url"] == "https://events.pagerduty.com/…"
    assert [one["kind"] for one in api.get(PATH).json["endpoints"]] == ["slack", "pagerduty"]
    changed = api.ask("PATCH", f"{PATH}/{pagerduty.json['id']}", {"routing_key": KEY[::-1]})
    assert changed.status == 200
    told = everything_stored(dsn) + capsys.readouterr().out + changed.body.decode() + pagerduty.body.decode()
    assert not [secret for secret in (KEY, KEY[::-1], "hunter2") if secret in told]
    for one in (slack, pagerduty):
        assert api.post(f"{PATH}/{one.json['id']}/rotate-secret").code == "NOT_SIGNED"
        assert api.ask("DELETE", f"{PATH}/{one.json['id']}").status == 200
    assert query("SELECT count(*) FROM secrets") == [(0,)]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (SLACK | {"url": "http://169.254.169.254/"}, "url"),
        (PAGERDUTY | {"url": "http://127.0.0.1/"}, "url"),
        (PAGERDUTY | {"routing_key": "short"}, "routing_key"),
        (SLACK | {"routing_key": KEY}, "routing_key"),
        (PAGERDUTY | {"addresses": ["ops@example.com"]}, "addresses"),
        ({"kind": "slack", "events": ["*"]}, "url"),
        ({"kind": "pagerduty", "events": ["*"]}, "routing_key"),
    ],
)
def test_what_does_not_fit_its_kind_is_refused(shared_api, body, field):
    answer = shared_api.post(PATH, body)
    assert (answer.status, answer.code) == (422, "INVALID_INPUT")
    assert field in answer.json["error"]["message"]
    assert KEY not in answer.body.decode()


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (SLACK | {"kind": "email"}, "This should be one of 'webhook', 'mail', 'slack', 'pagerduty', not 'email'"),
        ({"events": ["*"]}, "Field required"),
    ],
)
def test_a_kind_that_does_not_exist_is_answered_with_those_that_do(shared_api, body, problem):
    answer = shared_api.post(PATH, body)
    assert (answer.status, answer.json["error"]["details"]) == (422, [{"where": "body.kind", "problem": problem}])


def test_a_routing_key_is_sent_to_the_url_that_it_was_given_for(shared_api):
    number = shared_api.post(PATH, PAGERDUTY).json["id"]
    moved = {"url": "https://93.184.216.34/v2/enqueue"}
    refused = shared_api.ask("PATCH", f"{PATH}/{number}", moved)
    assert (refused.status, refused.json["error"]["message"][:12]) == (422, "routing_key:")
    assert shared_api.ask("PATCH", f"{PATH}/{number}", moved | {"routing_key": KEY}).status == 200
    slack = shared_api.post(PATH, SLACK).json["id"]
    assert shared_api.ask("PATCH", f"{PATH}/{slack}", {"routing_key": KEY}).status == 422
