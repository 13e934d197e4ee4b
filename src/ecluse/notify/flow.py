"""The path of one delivery. Somebody is to be told of an event: that is a run of this flow, with one item, in the stage
`webhook` or `mail`. It is committed together with its row in `deliveries`, so that it survives whatever dies; an item
that was not taken waits for its next attempt, over a day, and holds up nobody. Nothing waits for a delivery: whatever
becomes of it, the run it tells of has ended as it has.

Deliveries are made by `dispatch.py`, never by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Literal

from pydantic import BaseModel

from ecluse.base.masking import masked
from ecluse.db.connect import Connection
from ecluse.engine import Flow, Lane, NewItem, Run, Stage, begin_runs, open_stage
from ecluse.notify import mail, work
from ecluse.notify.rules import FLOW_NAME, LONGEST_WAIT, RETRY
from ecluse.notify.work import Setup, resources

# Of one receiver at a time this many: one that hangs keeps no more hands than that.
PER_RECEIVER = 4


class Input(BaseModel):
    kind: Literal["webhook", "mail"]
    to: str  # who waits behind whom: the endpoint, or the recipient
    lasting: bool = True  # tried for a day, because an endpoint was made for that


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


# Of those whom one schedule names: whoever did not hear of its run after three tries looks at the run.
BRIEF = tuple(
    replace(stage, name=f"{stage.name}-of-schedule", retry=replace(RETRY, executions=3)) for stage in (WEBHOOK, MAIL)
)


async def begin(connection: Connection, runs: Sequence[Run]) -> None:
    await begin_runs(connection, FLOW, runs)
    for stage in FLOW.stages:
        mine = [
            run for run in runs if stage.name == run.input["kind"] + ("" if run.input["lasting"] else "-of-schedule")
        ]
        if mine:
            await open_stage(connection, stage, [(run, [_message(run.input["to"])]) for run in mine], select=True)


def _message(to: str) -> NewItem:
    """What its run answers for: that this receiver is told. One without an endpoint may have a token in its URL."""
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
    """The same, able to deliver."""
    return replace(FLOW, vendors=partial(resources, setup))
