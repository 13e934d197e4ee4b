"""The notifications flow. Each delivery of an event to a recipient is a run of this flow with one item, in the stage
`mail` or, for every kind of recipient that has a URL, `webhook`. It is committed together with its row in `deliveries`,
so that it survives crashes. An item that was not accepted is retried over a day and does not block others. Nothing
waits for a delivery: its result does not change the run that it is about.

Deliveries are created by `dispatch.py`, never by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial

from pydantic import BaseModel

from ecluse.base.masking import masked
from ecluse.db.connect import Connection
from ecluse.engine import Flow, Lane, NewItem, Run, Stage, open_stage
from ecluse.notify import mail, work
from ecluse.notify.rules import FLOW_NAME, LONGEST_WAIT, RETRY, Kind
from ecluse.notify.work import Setup, resources

# Calls in flight per receiver: a receiver that hangs occupies no more worker slots than that.
PER_RECEIVER = 4


class Input(BaseModel):
    kind: Kind
    to: str  # the item's group, to which the cap per receiver applies: the endpoint, or the recipient
    lasting: bool = True  # retried for a day: true for endpoints, false for recipients of a schedule


WEBHOOK = Stage(
    "webhook",
    Lane("webhooks", max_per_key=PER_RECEIVER, one_vendor=False),
    work.post,
    retry=RETRY,
    time_limit=timedelta(minutes=2),
    max_wait=LONGEST_WAIT,
)
MAIL = Stage(
    "mail",
    Lane("mail", max_in_flight=PER_RECEIVER, breaker=mail.DOWN),
    mail.send,
    retry=RETRY,
    time_limit=timedelta(minutes=5),
    max_wait=LONGEST_WAIT,
)


# Stages for recipients named by a schedule: given up after three executions, since they can look at the run itself.
BRIEF = tuple(
    replace(stage, name=f"{stage.name}-of-schedule", retry=replace(RETRY, executions=3)) for stage in (WEBHOOK, MAIL)
)


async def begin(connection: Connection, runs: Sequence[Run]) -> None:
    """Open the stage of each new run with its one item. The kind of recipient decides the stage; recipients of a
    schedule have stages with fewer retries."""
    for stage in FLOW.stages:
        if mine := [run for run in runs if stage.name == _stage(run)]:
            await open_stage(connection, stage, [(run, [_message(run.input["to"])]) for run in mine], select=True)


def _stage(run: Run) -> str:
    stage = MAIL if run.input["kind"] == "mail" else WEBHOOK
    return stage.name + ("" if run.input["lasting"] else "-of-schedule")


def _message(to: str) -> NewItem:
    """Return the run's only item. Its target is the receiver, masked, because the URL of a receiver without an endpoint
    may contain a token."""
    return NewItem("message", target=masked(to), group=to)


NOT_BY_HAND = "Deliveries are made by events: send a test message with POST /api/notifications/endpoints/ID/test."
FLOW = Flow(
    FLOW_NAME,
    (WEBHOOK, MAIL, *BRIEF),
    story=None,
    input=Input,
    tables=("deliveries",),
    begin=begin,
    not_by_hand=NOT_BY_HAND,
)


def working(setup: Setup) -> Flow:
    """Return the flow with the resources that it needs to deliver (HTTP client, pool, mail settings)."""
    return replace(FLOW, vendors=partial(resources, setup))
