"""What becomes of due instants, as a table: given a schedule, what it is held by, and what time it is."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from ecluse.engine.slots import OVERLAP, Decision, Rules, Schedule, decide

RULES = Rules(look_back=timedelta(minutes=20), catch_up_within=timedelta(hours=24))
NIGHT = datetime(2026, 6, 10, tzinfo=UTC)


def at(hours: int, minutes: int = 0) -> datetime:
    return NIGHT + timedelta(hours=hours, minutes=minutes)


HOURLY = Schedule(
    id=1, tenant_id="t", flow="f", cron="0 * * * *", timezone="UTC", window_start=None, window_end=None, input={},
    overlap="wait", catch_up="latest", handled_until=at(7), failures=0, held=False, waiting=None, tenant_disabled=False,
)  # fmt: skip
NIGHTLY = replace(HOURLY, cron="0 1 * * *", window_start="02:00", window_end="06:00", handled_until=at(0))


def in_short(decision: Decision) -> list[str]:
    return [f"{slot.due_at:%H:%M} {slot.state}" for slot in decision.slots]


@pytest.mark.req("AUT-130", "AUT-131", "AUT-132", "AUT-133", "G-27", "G-85", "JOB-33", "JOB-38")
@pytest.mark.parametrize(
    ("schedule", "now", "slots", "next_due"),
    [
        (HOURLY, at(7, 59), [], at(8)),
        (HOURLY, at(8), ["08:00 fired"], at(9)),
        (HOURLY, at(8, 20), ["08:00 fired"], at(9)),
        (HOURLY, at(8, 21), ["08:00 fired"], at(9)),
        (replace(HOURLY, catch_up="skip"), at(8, 20), ["08:00 fired"], at(9)),
        (replace(HOURLY, catch_up="skip"), at(8, 21), ["08:00 missed"], at(9)),
        (HOURLY, at(10, 5), ["08:00 missed", "09:00 missed", "10:00 fired"], at(11)),
        (replace(HOURLY, cron="*/10 * * * *"), at(7, 41),
         ["07:10 missed", "07:20 missed", "07:30 skipped", "07:40 fired"], at(7, 50)),
        (replace(HOURLY, cron="0 8 10 * *"), at(32), ["08:00 fired"], datetime(2026, 7, 10, 8, tzinfo=UTC)),
        (replace(HOURLY, cron="0 8 10 * *"), at(32, 1), ["08:00 missed"], datetime(2026, 7, 10, 8, tzinfo=UTC)),
        # Overlap: waits until 20 minutes after it was due.
        (replace(HOURLY, held=True), at(8), ["08:00 waiting"], at(8, 20)),
        (replace(HOURLY, held=True, overlap="allow"), at(8), ["08:00 fired"], at(9)),
        (replace(HOURLY, held=True), at(8, 21), ["08:00 skipped"], at(9)),
        (replace(HOURLY, held=True, waiting=at(8), handled_until=at(8)), at(8, 10), ["08:00 waiting"], at(8, 20)),
        (replace(HOURLY, waiting=at(8), handled_until=at(8)), at(8, 10), ["08:00 fired"], at(9)),
        (replace(HOURLY, waiting=at(8), handled_until=at(8)), at(8, 21), ["08:00 skipped"], at(9)),
        (replace(HOURLY, held=True, waiting=at(8), handled_until=at(8)), at(9),
         ["08:00 skipped", "09:00 waiting"], at(9, 20)),
        # A window: due when it opens, and never fired outside.
        (NIGHTLY, at(1, 30), [], at(2)),
        (NIGHTLY, at(2), ["02:00 fired"], at(26)),
        (NIGHTLY, at(6), ["02:00 fired"], at(26)),
        (NIGHTLY, at(6, 1), ["02:00 skipped"], at(26)),
        (replace(NIGHTLY, catch_up="skip"), at(6), ["02:00 missed"], at(26)),
        (replace(HOURLY, tenant_disabled=True), at(9), ["08:00 skipped", "09:00 skipped"], at(10)),
        (replace(HOURLY, tenant_disabled=True, waiting=at(7)), at(7, 5), ["07:00 skipped"], at(8)),
    ],
)  # fmt: skip
def test_what_becomes_of_due_instants(schedule, now, slots, next_due):
    decision = decide(schedule, now, RULES)
    assert in_short(decision) == slots
    assert decision.next_due_at == next_due
    assert decision.fires == (decision.slots[-1].due_at if slots and slots[-1].endswith("fired") else None)
    assert decision.handled_until == max([schedule.handled_until, *(slot.due_at for slot in decision.slots)])
    assert all(slot.state == "fired" or slot.reason for slot in decision.slots)


def test_a_slot_that_was_given_up_for_overlap_says_so():
    held = replace(HOURLY, held=True, waiting=at(8), handled_until=at(8))
    assert decide(held, at(8, 21), RULES).slots[-1].reason == OVERLAP
    assert str(decide(held, at(9), RULES).slots[0].reason).startswith(OVERLAP)


@pytest.mark.req("G-27")
@pytest.mark.parametrize("away", [timedelta(minutes=1), timedelta(hours=1), timedelta(hours=25), timedelta(days=40)])
def test_every_instant_of_a_downtime_is_recorded_or_counted(away):
    """TM-04: and no more than one is fired."""
    minutely = replace(HOURLY, cron="* * * * *")
    decision = decide(minutely, at(7) + away, RULES)
    assert len(decision.slots) + decision.uncounted == away // timedelta(minutes=1)
    assert len(decision.slots) <= 100
    assert [slot.state for slot in decision.slots].count("fired") == 1
