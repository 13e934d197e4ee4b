"""Whether budgets have room for a call, and until when it waits if they have not."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal

import pytest

from ecluse.engine.model.budget import AGAIN, REST, UNTIL_RAISED, Total, admit, amount, reason, totals_of

NOW = datetime(2026, 12, 31, 17, 30, tzinfo=UTC)
DAY, MONTH, OF_SCHEDULE, MONTH_OF_SCHEDULE, RUN = KEYS = totals_of("t", 3, 7, date(2026, 12, 30), NOW.date())


def totals(**budgets: str) -> dict:
    """All totals, 0.4 spent and 0.1 reserved in each, with the budgets that are named."""
    names = dict(zip(("day", "month", "schedule", "schedule_month", "run"), KEYS, strict=True))
    found = {key: Total(Decimal("0.4"), Decimal("0.1"), None) for key in KEYS}
    for name, value in budgets.items():
        found[names[name]].budget = Decimal(value)
    return found


def test_a_call_counts_for_its_tenant_its_schedule_and_its_run() -> None:
    named = [(key.scope, key.subject_id, key.period, key.starts_on.isoformat()) for key in KEYS]
    assert named == [
        ("tenant", 0, "day", "2026-12-31"),
        ("tenant", 0, "month", "2026-12-01"),
        ("schedule", 3, "day", "2026-12-31"),
        ("schedule", 3, "month", "2026-12-01"),
        ("run", 7, "all", "2026-12-30"),
    ]
    assert [key.scope for key in totals_of("t", None, 7, NOW.date(), NOW.date())] == ["tenant", "tenant", "run"]


def test_a_call_that_fits_exactly_is_reserved_in_every_total() -> None:
    found = totals(day="1", run="1.0")
    assert admit(Decimal("0.5"), KEYS, found, NOW) is None
    assert {total.reserved for total in found.values()} == {Decimal("0.6")}
    assert admit(Decimal("0.000000001"), KEYS, found, NOW) is not None


def test_a_call_that_does_not_fit_is_reserved_nowhere() -> None:
    found = totals(day="100", run="0.6")
    assert admit(Decimal("0.2"), KEYS, found, NOW) is not None
    assert {total.reserved for total in found.values()} == {Decimal("0.1")}


@pytest.mark.parametrize(
    ("budgets", "until", "words"),
    [
        (
            {"day": "0.5"},
            datetime(2027, 1, 1, tzinfo=UTC),
            "day's budget of tenant t has 0.1 left, too little for this call (0.4 of 0.5 spent",
        ),
        ({"month": "0.5"}, datetime(2027, 1, 1, tzinfo=UTC), "month's budget of tenant t"),
        ({"schedule": "0.5"}, datetime(2027, 1, 1, tzinfo=UTC), "day's budget of schedule 3"),
        ({"run": "0.5"}, NOW + UNTIL_RAISED, "budget of run 7 has 0.1 left"),
        ({"run": "0.5"}, NOW + UNTIL_RAISED, "it continues when it is raised"),
        ({"day": "0.5", "run": "0.5"}, NOW + UNTIL_RAISED, "it continues when they are raised"),
        ({"day": "0.65"}, NOW + AGAIN, "calls in flight held the rest of the day's budget"),
    ],
)
def test_a_call_waits_for_the_budget_that_takes_longest(budgets: dict[str, str], until: datetime, words: str) -> None:
    over = admit(Decimal("0.2"), KEYS, totals(**budgets), NOW)
    assert over is not None
    assert over.until == until
    assert words in over.why


def test_all_budgets_without_room_are_named_and_how_much_of_each_is_of_unknown_cost() -> None:
    over = admit(Decimal("0.2"), KEYS, totals(day="0.4", schedule_month="0.5", month="9", schedule="0.65"), NOW)
    assert over is not None
    assert over.key == DAY
    assert over.why == (
        "the day's budget of tenant t is used up (0.4 of 0.4 spent, 0.1 reserved; this call may cost 0.2); the month's"
        " budget of schedule 3 has 0.1 left, too little for this call (0.4 of 0.5 spent, 0.1 reserved); calls in flight"
        " held the rest of the day's budget of schedule 3 (0.4 of 0.65 spent, 0.1 reserved); it continues at 2027-01-01"
        " 00:00:00Z, or when they are raised"
    )
    said = reason(over.refused[:2], {DAY: Decimal("0.3"), MONTH_OF_SCHEDULE: Decimal(0)})
    assert "(0.4 of 0.4 spent, 0.3 of it by calls whose cost is unknown, 0.1 reserved; this call may cost 0.2)" in said
    assert said.count("unknown") == 1


@pytest.mark.parametrize(
    ("budgets", "named"),
    [
        ({"day": "0.4", "schedule": "0.4", "run": "0.4"}, ["budget of run 7", "tenant t", "schedule 3"]),
        ({"day": "0.4", "schedule": "0.4"}, ["tenant t"]),
        ({"day": "0.65", "schedule": "0.4"}, ["tenant t", "schedule 3"]),
    ],
)
def test_other_calls_are_told_only_of_budgets_that_they_count_against(
    budgets: dict[str, str], named: list[str]
) -> None:
    over = admit(Decimal("0.2"), KEYS, totals(**budgets), NOW)
    assert over is not None
    said = over.why_others
    assert "a call of the same stage may cost 0.2" in said
    assert "this call" not in said
    assert {one for one in ("budget of run 7", "tenant t", "schedule 3") if one in said} == set(named)


def test_the_next_month_begins_on_its_first_day() -> None:
    for day, following in ((date(2026, 1, 31), date(2026, 2, 1)), (date(2026, 2, 28), date(2026, 3, 1))):
        month = totals_of("t", None, 1, day, day)[1]
        assert month.renewed_at == datetime.combine(following, datetime.min.time(), UTC)


def test_a_small_rest_is_used_up_and_a_large_one_is_not() -> None:
    """One call that is larger than most must not stop those that fit."""
    for budget, used_up in (("0.44", True), ("0.5", False)):
        over = admit(Decimal("0.3"), [DAY], totals(day=budget), NOW)
        assert over is not None
        assert (over.others, over.refused[0].used_up) == (used_up, used_up)
        assert (Decimal(budget) - Decimal("0.4") <= REST * Decimal(budget)) is used_up


def test_a_rest_that_calls_in_flight_hold_is_not_used_up() -> None:
    over = admit(Decimal("0.05"), [DAY], totals(day="0.5"), NOW)
    assert over is not None
    assert (over.others, over.refused[0].used_up, over.until - NOW) == (True, False, AGAIN)


@pytest.mark.parametrize(("value", "text"), [("0.10", "0.1"), ("100", "100"), ("0", "0"), ("0.000001234", "0.000001")])
def test_amounts_are_plain(value: str, text: str) -> None:
    assert amount(Decimal(value)) == text
