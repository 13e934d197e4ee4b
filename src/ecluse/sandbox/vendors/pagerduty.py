"""PagerDuty's Events API v2: ``POST /v2/enqueue`` with a routing key of 32 characters. A trigger opens the incident of
its routing key and ``dedup_key``, unless it is open; a resolve closes it. Each opening and closing is an effect on the
``dedup_key``, with the severity or ``resolved`` as its value."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from ecluse.sandbox.vendor import Answer, Call, json_answer, json_object

SEVERITIES = ("critical", "error", "warning", "info")
LONGEST_SUMMARY, LONGEST_DEDUP_KEY = 1_024, 255


class PagerDuty:
    """The simulated PagerDuty."""

    def __init__(self, seed: int) -> None:  # noqa: ARG002 - its answers do not depend on it
        self._open: dict[tuple[str, str], str] = {}  # severity by routing key and dedup_key

    def ref(self, call: Call) -> str | None:
        body = json_object(call.body)
        return str(body["dedup_key"]) if body is not None and body.get("dedup_key") else None

    def error(self, status: int, code: str, message: str) -> Answer:
        return json_answer({"status": code.replace("_", " "), "message": message, "errors": [message]}, status)

    def handle(self, call: Call) -> Answer:
        if (call.method, call.path) != ("POST", "/v2/enqueue"):
            return self.error(404, "not_found", "Not Found")
        body: dict[str, Any] | None = json_object(call.body)
        if body is None or (wrong := _wrong(body)) is not None:
            return self.error(400, "invalid_event", "Event object is invalid" if body is None else str(wrong))
        dedup_key = body.get("dedup_key") or blake2b(call.body, digest_size=16).hexdigest()
        incident = (body["routing_key"], dedup_key)
        if body["event_action"] == "trigger" and incident not in self._open:
            self._open[incident] = body["payload"]["severity"]
            call.effect(dedup_key, self._open[incident])
        elif body["event_action"] == "resolve" and incident in self._open:
            call.effect(dedup_key, "resolved", self._open.pop(incident))
        return json_answer({"status": "success", "message": "Event processed", "dedup_key": dedup_key}, 202)


def _wrong(body: dict[str, Any]) -> str | None:
    """Return the message with which the API refuses an invalid event; None if the event is valid."""
    key, dedup_key, payload = body.get("routing_key"), body.get("dedup_key"), body.get("payload")
    if not isinstance(key, str) or len(key) != 32:
        return "'routing_key' is invalid"
    if body.get("event_action") not in ("trigger", "acknowledge", "resolve"):
        return "'event_action' is invalid"
    if dedup_key is not None and not (isinstance(dedup_key, str) and len(dedup_key) <= LONGEST_DEDUP_KEY):
        return "'dedup_key' is invalid"
    if body["event_action"] != "trigger":
        return None if dedup_key else "'dedup_key' is missing or blank"
    if not isinstance(payload, dict):
        return "'payload' is missing or blank"
    summary = payload.get("summary")
    if not isinstance(summary, str) or not 0 < len(summary) <= LONGEST_SUMMARY:
        return "'payload.summary' is invalid"
    if not isinstance(payload.get("source"), str) or not payload["source"]:
        return "'payload.source' is missing or blank"
    return None if payload.get("severity") in SEVERITIES else "'payload.severity' is invalid"
