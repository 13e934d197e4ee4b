"""What becomes of due instants, as a table: given a schedule, what it is held by, and what time it is."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from ecluse.engine.schedule.slot_decisions import OVERLAP, Decision, FiringLimits, Schedule, decide

RULES = FiringLimits(look_back=timedelta(minutes=20), catch_up_within=timedelta(hours=24))
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


def test_an_instant_beyond_the_catch_up_limit_names_the_limit_and_its_knob():
    (*_, latest) = decide(NIGHTLY, at(26 + 23), replace(RULES, catch_up_within=timedelta(hours=1.5))).slots
    limit = "the catch-up limit of 1.5 h (ECLUSE_CATCH_UP_HOURS)"
    assert latest.reason == f"no scheduler was running in time, and the instant is older than {limit}"


@pytest.mark.req("G-27")
@pytest.mark.parametrize("away", [timedelta(minutes=1), timedelta(hours=1), timedelta(hours=25), timedelta(days=40)])
def test_every_instant_of_a_downtime_is_recorded_or_counted(away):
    """TM-04: and no more than one is fired."""
    minutely = replace(HOURLY, cron="* * * * *")
    decision = decide(minutely, at(7) + away, RULES)
    assert len(decision.slots) + decision.uncounted == away // timedelta(minutes=1)
    assert len(decision.slots) <= 100
    assert [slot.state for slot in decision.slots].count("fired") == 1


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.req("AUT-202", "AUT-130", "AUT-154", "AUT-155", "AUT-156", "G-28")
@pytest.mark.parametrize(
    ("zone", "cron", "handled", "now", "fires", "next_due"),
    [
        # Paris leaves out 02:30 on 29 March: once, at the first instant after the gap, and as ever on the next day.
        ("Europe/Paris", "30 2 * * *", "2026-03-28T01:30", "2026-03-29T00:59", None, "2026-03-29T01:00"),
        ("Europe/Paris", "30 2 * * *", "2026-03-28T01:30", "2026-03-29T01:00", "2026-03-29T01:00", "2026-03-30T00:30"),
        ("Europe/Paris", "30 2 * * *", "2026-03-29T01:00", "2026-03-29T01:30", None, "2026-03-30T00:30"),
        # It has 02:30 twice on 25 October: a fixed time counts once, what follows the clock twice.
        ("Europe/Paris", "30 2 * * *", "2026-10-24T00:30", "2026-10-25T00:30", "2026-10-25T00:30", "2026-10-26T01:30"),
        ("Europe/Paris", "30 2 * * *", "2026-10-25T00:30", "2026-10-25T01:45", None, "2026-10-26T01:30"),
        ("Europe/Paris", "30 * * * *", "2026-10-25T00:30", "2026-10-25T01:30", "2026-10-25T01:30", "2026-10-25T02:30"),
        # Lord Howe moves its clocks by half an hour, at 02:00.
        ("Australia/Lord_Howe", "15 2 * * *", "2026-10-02T15:45", "2026-10-03T15:30", "2026-10-03T15:30",
         "2026-10-04T15:15"),
        ("Australia/Lord_Howe", "45 1 * * *", "2026-04-03T14:45", "2026-04-04T15:20", "2026-04-04T14:45",
         "2026-04-05T15:15"),
        # Around the date line it is another day: Sunday in Kiritimati and Saturday in Pago Pago at one instant.
        ("Pacific/Kiritimati", "30 0 * * 0", "2026-06-01T00:00", "2026-06-06T10:30", "2026-06-06T10:30",
         "2026-06-13T10:30"),
        ("Pacific/Pago_Pago", "30 23 * * 6", "2026-06-01T00:00", "2026-06-07T10:30", "2026-06-07T10:30",
         "2026-06-14T10:30"),
        # Apia has left out 30 December 2011: its run is made up for when the 31st begins.
        ("Pacific/Apia", "0 6 30 12 *", "2011-12-01T00:00", "2011-12-30T10:00", "2011-12-30T10:00",
         "2012-12-29T16:00"),
        # Days and months end by the zone's own clock.
        ("America/New_York", "59 23 31 12 *", "2026-06-01T00:00", "2027-01-01T04:59", "2027-01-01T04:59",
         "2028-01-01T04:59"),
    ],
)  # fmt: skip
def test_the_most_recent_due_time_at_the_edges_of_zones(zone, cron, handled, now, fires, next_due):
    schedule = replace(HOURLY, cron=cron, timezone=zone, handled_until=utc(handled))
    decision = decide(schedule, utc(now), RULES)
    assert decision.fires == (None if fires is None else utc(fires))
    assert decision.next_due_at == utc(next_due)


@pytest.mark.req("AUT-202", "AUT-130")
@pytest.mark.parametrize(
    ("late", "state"),
    [(timedelta(0), "fired"), (timedelta(minutes=20), "fired"), (timedelta(minutes=20, microseconds=1), "missed")],
)
@pytest.mark.parametrize(("zone", "due"), [("Europe/Paris", "2026-03-29T01:00"), ("Europe/Paris", "2026-10-25T00:30"),
                                           ("UTC", "2026-06-01T02:30")])  # fmt: skip
def test_at_the_border_of_its_window_a_due_time_is_in_time_and_beyond_it_is_not(zone, due, late, state):
    """Also where the clocks change within the window: its length is real time."""
    schedule = replace(
        HOURLY, cron="30 2 * * *", timezone=zone, catch_up="skip", handled_until=utc(due) - timedelta(hours=20)
    )
    (slot,) = decide(schedule, utc(due) + late, RULES).slots
    assert (slot.due_at, slot.state) == (utc(due), state)
    assert not decide(schedule, utc(due) - timedelta(microseconds=1), RULES).slots
