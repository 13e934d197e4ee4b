"""Incoming webhooks of Slack: ``POST /services/<team>/<app>/<secret>`` with JSON that has a ``text``. Answers are plain
text. A message is an effect on its webhook; a webhook whose secret is ``archived`` answers 410."""

from __future__ import annotations

import re

from ecluse.sandbox.vendor import Answer, Call, json_object

ROUTE = re.compile(r"/services/(T\w+/B\w+/\w+)")
LONGEST_TEXT = 40_000


class Slack:
    """The simulated Slack."""

    def __init__(self, seed: int) -> None:
        pass  # its answers do not depend on it

    def ref(self, call: Call) -> str | None:
        found = ROUTE.fullmatch(call.path)
        return found[1] if found else None

    def error(self, status: int, code: str, message: str) -> Answer:  # noqa: ARG002 - its errors are codes
        return Answer(status, code.encode(), {"Content-Type": "text/plain"})

    def handle(self, call: Call) -> Answer:
        webhook = self.ref(call)
        if call.method != "POST" or webhook is None:
            return self.error(404, "no_service", "")
        if webhook.endswith("/archived"):
            return self.error(410, "channel_is_archived", "")
        body = json_object(call.body)
        if body is None or not isinstance(body.get("text", ""), str):
            return self.error(400, "invalid_payload", "")
        text = str(body.get("text", ""))
        if not 0 < len(text) <= LONGEST_TEXT:
            return self.error(400, "no_text", "")
        call.effect(webhook, text)
        return Answer(200, b"ok", {"Content-Type": "text/plain"})
