"""Alerts that a flow declares: one open per record and measure, cleared with the value or the record, an event each."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg
import pytest

from ecluse.db.connect import Connection
from ecluse.db.query import fetch_rows
from ecluse.engine import Alert, Alerts, Measure, Measured
from ecluse.engine.cluster.alerts import evaluate_measures
from tests.support.engine_flows import flow, stage
from tests.support.pricing_rows import connected

QUEUE = Measure("queue", "{value} letters wait, more than {limit}", action="Read them.", expr="letters", until=2)
ALERTS = "SELECT tenant_id, record_id, alert, summary, cleared_at IS NULL FROM alerts ORDER BY id"
EVENTS = "SELECT event_type, aggregate, payload ->> 'box_id' FROM events_outbox ORDER BY id"
COPY = """
INSERT INTO alerts (flow, tenant_id, record_id, measure, alert, severity, summary, action, raised_at)
SELECT flow, tenant_id, record_id, measure, 'another', severity, summary, action, raised_at FROM alerts
"""


class Boxes:
    """A flow whose records are boxes of letters."""

    def __init__(self) -> None:
        self.letters: dict[str, float | None] = {}
        self.slowed: list[str] = []
        table = (Alert("Flood", "critical", QUEUE, 10), Alert("Many", "warning", QUEUE, 5, while_open=self.slow))
        self.flow = flow(stage(), "letters", alerts=Alerts("box", self.read, table))

    async def read(self, _: Connection) -> Sequence[Measured]:
        return [Measured("acme", box, f"Box {box}", {"queue": count}) for box, count in self.letters.items()]

    async def slow(self, _: Connection, box: Measured) -> None:
        self.slowed.append(box.id)


async def test_an_alert_of_a_flow_is_raised_once_and_gives_way_to_a_more_severe_one(dsn):
    boxes = Boxes()
    async with connected(dsn) as connection:
        for count in (5, 6, 4, 11, 6, 2):
            boxes.letters = {"7": count, "8": None}
            await evaluate_measures(connection, boxes.flow)
        rows = await fetch_rows(connection, ALERTS)
        events = await fetch_rows(connection, EVENTS)
    assert [row[1:3] for row in rows] == [("7", "Many"), ("7", "Flood")]
    assert rows[0][3:] == ("Box 7: 6 letters wait, more than 5", False)
    assert not any(is_open for *_, is_open in rows)
    assert boxes.slowed == ["7", "7"]
    kinds = ("warning.raised", "warning.cleared", "critical.raised", "critical.cleared")
    assert events == [(f"letters.alert.{kind}", "letters_box:7", "7") for kind in kinds]


async def test_the_alert_of_a_record_that_is_gone_is_cleared_and_two_of_a_measure_cannot_be_open(dsn):
    boxes = Boxes()
    boxes.letters = {"7": 11.0}
    async with connected(dsn) as connection:
        await evaluate_measures(connection, boxes.flow)
        with pytest.raises(psycopg.errors.UniqueViolation):
            await connection.execute(COPY)
        boxes.letters = {}
        await evaluate_measures(connection, boxes.flow)
        assert [row[2:] for row in await fetch_rows(connection, ALERTS)] == [
            ("Flood", "Box 7: 11.0 letters wait, more than 10", False)
        ]
