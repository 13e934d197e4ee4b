"""The bodies of messages to services with a format of their own: Slack (incoming webhooks) and PagerDuty (Events API
v2). They are composed from the message of a webhook. Of its data, `summary`, `severity` and `dedup_key` have a meaning
here; texts in it may come from a caller or a vendor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ecluse.base.masking import masked_value
from ecluse.base.text import storable

SEVERITIES = ("critical", "error", "warning", "info")
CLEARED = ".cleared"  # ends the type of an event that resolves what an earlier one with its `dedup_key` has triggered
LONGEST_LINE = 500
LONGEST_TEXT = 3_000
LONGEST_SUMMARY = 1_024


def slack(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body for an incoming webhook of Slack: a headline, and a line per value of the data."""
    data = masked_value(message["data"])
    summary = data.pop("summary", None)
    headline = f"*{_escaped(message['type'])}*" + ("" if summary is None else f": {_escaped(summary)}")
    lines = [f"{_escaped(name)}: {_escaped(value)}" for name, value in data.items() if name != "dedup_key"]
    text = "\n".join([headline, *lines, _escaped(message["timestamp"])])
    return {"text": storable(text, LONGEST_TEXT), "unfurl_links": False, "unfurl_media": False}


def pagerduty(message: Mapping[str, Any], *, routing_key: str, source: str, dedup_key: str) -> dict[str, Any]:
    """Return the body for PagerDuty: the event that triggers an incident or, if its type ends with CLEARED, resolves
    it."""
    event = {"routing_key": routing_key, "dedup_key": dedup_key}
    if message["type"].endswith(CLEARED):
        return {**event, "event_action": "resolve"}
    data = masked_value(message["data"])
    summary = " ".join(str(data.get("summary") or message["type"]).split())
    payload = {
        "summary": storable(summary, LONGEST_SUMMARY),
        "source": source,
        "severity": _severity(message["type"], data.get("severity")),
        "timestamp": message["timestamp"],
        "class": message["type"],
        "custom_details": data,
    }
    return {**event, "event_action": "trigger", "client": "Ecluse", "payload": payload}


def _severity(event_type: str, given: Any) -> str:
    if given in SEVERITIES:
        return str(given)
    return "error" if event_type.endswith("failed") else "info"


def _escaped(value: Any) -> str:
    """Return a value as one line, cut to LONGEST_LINE characters, in which Slack finds no link, mention or entity."""
    line = storable(" ".join(str(value).split()), LONGEST_LINE)
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
