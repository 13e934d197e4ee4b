"""The simulated Slack and PagerDuty refuse what the services refuse."""

from __future__ import annotations

from typing import Any

import pytest

from ecluse.testing.sandbox import SandboxProcess
from tests.sandbox.client import Client

SLACK, PAGERDUTY = "slack/services/T0/B0/x", "pagerduty/v2/enqueue"
PAYLOAD = {"summary": "full", "source": "here", "severity": "critical"}
TRIGGER = {"routing_key": "k" * 32, "event_action": "trigger", "dedup_key": "a", "payload": PAYLOAD}
RESOLVE = {"routing_key": "k" * 32, "event_action": "resolve", "dedup_key": "a"}


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        (SLACK, {"text": "hello"}, 200, "ok"),
        (SLACK, {"text": ""}, 400, "no_text"),
        (SLACK, {"text": 1}, 400, "invalid_payload"),
        (SLACK, [], 400, "invalid_payload"),
        ("slack/services/T0/x", {"text": "hello"}, 404, "no_service"),
        ("slack/services/T0/B0/archived", {"text": "hello"}, 410, "channel_is_archived"),
    ],
)
async def test_slack_answers_in_plain_text(http: Client, path: str, body: Any, status: int, said: str) -> None:
    answer = await http.post(path, json=body)
    assert (answer.status, answer.body.decode()) == (status, said)


async def test_an_incident_is_opened_once_and_closed_once(http: Client, sandbox: SandboxProcess) -> None:
    for event in (TRIGGER, TRIGGER, RESOLVE, RESOLVE, TRIGGER):
        answer = await http.post(PAGERDUTY, json=event)
        assert (answer.status, answer.json()["dedup_key"]) == (202, "a")
    assert [one["value"] for one in sandbox.ledger("pagerduty", "effect")] == ["critical", "resolved", "critical"]


@pytest.mark.parametrize(
    ("event", "wrong"),
    [
        (TRIGGER | {"routing_key": "short"}, "routing_key"),
        (TRIGGER | {"event_action": "open"}, "event_action"),
        (TRIGGER | {"payload": PAYLOAD | {"severity": "high"}}, "severity"),
        (TRIGGER | {"payload": PAYLOAD | {"summary": "x" * 1025}}, "summary"),
        (TRIGGER | {"payload": PAYLOAD | {"source": ""}}, "source"),
        (TRIGGER | {"dedup_key": "x" * 256}, "dedup_key"),
        (TRIGGER | {"payload": None}, "payload"),
        (RESOLVE | {"dedup_key": None}, "dedup_key"),
    ],
)
async def test_an_event_that_is_not_valid_is_refused(http: Client, event: Any, wrong: str) -> None:
    answer = await http.post(PAGERDUTY, json=event)
    assert (answer.status, wrong in answer.json()["message"]) == (400, True)
