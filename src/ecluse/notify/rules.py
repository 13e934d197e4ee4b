"""Pure functions of notifications: computed keys and names, messages, retry times."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, StringConstraints

from ecluse.base.masking import ORIGIN_ENDS, origin_of
from ecluse.base.text import LONGEST_KEY
from ecluse.engine import RetryPolicy

if TYPE_CHECKING:
    from ecluse.vendors.guarded import GuardedHttp

Kind = Literal["webhook", "mail", "slack", "pagerduty"]

FLOW_NAME = "notifications"
CONFIRM = "address.confirm"  # type of the message that asks a mail address for a confirmation
# Event filters: all events, one event type, or those with a common prefix.
PATTERN = r"^(\*|[A-Za-z0-9_-]+([./][A-Za-z0-9_-]+)*([./]\*)?)$"
# A mail address as in HTML's input type: a single address, without quotes or comments, ASCII only.
ADDRESS = re.compile(
    r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{1,64}@[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
    r"(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)+"
)
LONGEST_ADDRESS = 254
ONLY_SHOWN = "this is the URL as it is shown, with its end hidden; give the full URL, or leave the field out"
ENDS = re.compile(r"[./](completed|failed|transcribed)$")  # types of events that tell the end of their run

# Backoff of 5 s, 20 s, 80 s, 5 min, 21 min, 85 min, 5.7 h, 8 h, 8 h: a day in total.
RETRY = RetryPolicy(executions=10, base=5, multiplier=4, longest=8 * 3600, jitter=0.1)
LONGEST_WAIT = timedelta(hours=30)
LONGEST_RETRY_AFTER = 15 * 60  # seconds: the longest Retry-After that the engine honours


def run_key(
    endpoint_id: int | None, recipient: str, kind: Kind, event_key: str, event_type: str, about: int | None
) -> str:
    """Return the event key of a delivery's run, which deduplicates by recipient and event. A webhook endpoint stays the
    same recipient when its URL changes. A mail address gets one mail per run and event, however many endpoints have it,
    and the events about the end of a run count as one."""
    if kind == "mail":
        who = f"mail-{_digest(recipient.lower())[:16]}"
        what = event_key if about is None else f"run:{about}:{'ended' if ENDS.search(event_type) else event_type}"
    else:
        who = str(endpoint_id) if endpoint_id is not None else f"{kind}-{_digest(recipient)[:16]}"
        what = event_key
    key = f"notify-{who}-{what}"
    # Leave room for the suffix of a redelivery.
    return key if len(key) <= LONGEST_KEY - 20 else f"notify-{who}-{_digest(what)}"


def shown_to(kind: Kind, recipient: str) -> str:
    """Return the recipient for people and logs. The path of a URL is often a secret: only its origin is shown."""
    return recipient if kind == "mail" else origin_of(recipient)


def message_id(tenant_id: str, event_key: str) -> str:
    """Return the id by which receivers deduplicate: the same for every attempt and every redelivery of an event."""
    return f"msg_{_digest(json.dumps([tenant_id, event_key]))[:40]}"


def message(event_type: str, occurred_at: datetime, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a webhook; messages of the other kinds are composed from it."""
    return {"type": event_type, "timestamp": occurred_at.isoformat(), "data": payload}


def patience(asked: float | None, executions: int) -> float | None:
    """Return the Retry-After that a receiver asked for, in seconds and at most LONGEST_RETRY_AFTER, if it is longer
    than our backoff after `executions` executions; otherwise None. A receiver that keeps asking for a short wait must
    not use up a day of attempts within minutes."""
    if asked is None:
        return None
    ours = min(RETRY.base * RETRY.multiplier**executions, RETRY.longest)
    bounded = min(asked, LONGEST_RETRY_AFTER)
    return bounded if bounded > ours else None


def about_run(aggregate: str, payload: Mapping[str, Any]) -> int | None:
    """Return the id of the run that an event is about, from its payload or its aggregate; None if it is about no
    run."""
    named = payload.get("run_id") or aggregate.removeprefix("run:")
    return int(named) if isinstance(named, str) and re.fullmatch(r"[1-9]\d{0,17}", named) else None


def is_address(text: str) -> bool:
    """Return True if the text is a mail address that Ecluse accepts."""
    return len(text) <= LONGEST_ADDRESS and ADDRESS.fullmatch(text) is not None


def _checked_address(text: str) -> str:
    if not is_address(text):
        raise ValueError("not a mail address; it must look like someone@example.com")
    return text


MailAddress = Annotated[str, StringConstraints(max_length=LONGEST_ADDRESS), AfterValidator(_checked_address)]


def why_refused(url: str, guard: GuardedHttp) -> str | None:
    """Return the reason, for the user who entered it, why this URL cannot be that of an endpoint; None if it can."""
    if url.endswith(ORIGIN_ENDS):
        return ONLY_SHOWN
    return guard.refuse_reason(url)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
