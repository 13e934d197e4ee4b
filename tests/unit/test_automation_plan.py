"""When a schedule of a type is due: the expression made of its fields, and the fields each type needs."""

from __future__ import annotations

import calendar
from datetime import UTC, datetime
from itertools import takewhile

import pytest
from pydantic import ValidationError

from ecluse.base import cron
from ecluse.base.validation import readable
from ecluse.flows.automation.plan import Changes, Plan, changed, cron_of, times_of

PLAN = {"name": "n", "schedule_type": "MANUAL", "fiche_selection": {"mode": "manual"}}


@pytest.mark.req("AUT-41", "G-39")
@pytest.mark.parametrize(
    ("given", "expression"),
    [
        (("MANUAL", None, None, None, None), None),
        (("CRON", "*/5 * * * 1", None, None, None), "*/5 * * * 1"),
        (("DAILY", None, "06:05", None, None), "5 6 * * *"),
        (("WEEKLY", None, "23:59", 0, None), "59 23 * * 0"),
        (("MONTHLY", None, "00:00", None, 1), "0 0 1 * *"),
        (("MONTHLY", None, "00:00", None, 28), "0 0 28 * *"),
        (("MONTHLY", None, "00:00", None, 29), "0 0 29L * *"),
        (("MONTHLY", None, "00:00", None, 31), "0 0 31L * *"),
    ],
)
def test_every_type_is_an_expression(given, expression):
    assert cron_of(*given) == expression


@pytest.mark.req("G-39")
@pytest.mark.parametrize("day", range(1, 32))
@pytest.mark.parametrize("zone", ["UTC", "Europe/Paris"])
def test_a_monthly_schedule_is_due_once_a_month_and_on_the_last_day_of_shorter_ones(day, zone):
    """2096 to 2105: with leap years, and 2100, which is none. 02:30 is missing on one day of March in Paris."""
    expression = cron_of("MONTHLY", None, "02:30", None, day)
    due = cron.parse(str(expression)).due(datetime(2095, 12, 31, 23, tzinfo=UTC), cron.zone(zone))
    found = [at.astimezone(cron.zone(zone)) for at in takewhile(lambda at: at.year < 2106, due)]
    months = [(year, month) for year in range(2096, 2106) for month in range(1, 13)]
    assert [(at.year, at.month, at.day) for at in found] == [
        (year, month, min(day, calendar.monthrange(year, month)[1])) for year, month in months
    ]
    assert all((at.hour, at.minute) in ((2, 30), (3, 0)) for at in found)


@pytest.mark.req("G-39", "G-69")
def test_a_day_that_a_month_may_not_have_is_explained_and_refused_where_it_makes_no_sense():
    assert cron.parse("30 2 30L * *").explain() == "At 02:30 on day 30, or the last day, of every month"
    assert cron.parse("30 2 30l 2 *").explain() == "At 02:30 on day 30, or the last day, of February"
    for wrong in ("0 0 28L * *", "0 0 32L * *", "0 0 1,30L * *", "0 0 30L/2 * *", "0 0 29L-31 * *", "0 30L * * *"):
        with pytest.raises(cron.InvalidInput):
            cron.parse(wrong)


@pytest.mark.req("AUT-41", "AUT-129", "G-39", "G-34")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"schedule_type": "DAILY"}, "DAILY needs time_of_day"),
        ({"schedule_type": "WEEKLY", "time_of_day": "06:00"}, "WEEKLY needs day_of_week"),
        ({"schedule_type": "WEEKLY"}, "needs time_of_day and day_of_week"),
        ({"schedule_type": "MONTHLY", "time_of_day": "06:00"}, "MONTHLY needs day_of_month"),
        ({"schedule_type": "CRON"}, "CRON needs cron_expression"),
        ({"schedule_type": "MANUAL", "time_of_day": "06:00"}, "time_of_day goes with schedule_type DAILY or WEEKLY"),
        ({"schedule_type": "DAILY", "time_of_day": "06:00", "day_of_week": 1}, "day_of_week goes with"),
        ({"schedule_type": "WEEKLY", "time_of_day": "06:00", "day_of_week": 1, "day_of_month": 1}, "MONTHLY, not with"),
        ({"schedule_type": "CRON", "cron_expression": "@daily", "time_of_day": "06:00"}, "not with CRON"),
        ({"schedule_type": "DAILY", "time_of_day": "24:00"}, "time_of_day"),
        ({"schedule_type": "DAILY", "time_of_day": "6:00"}, "time_of_day"),
        ({"schedule_type": "DAILY", "time_of_day": "06:00\n"}, "time_of_day"),
        ({"schedule_type": "WEEKLY", "time_of_day": "06:00", "day_of_week": 8}, "day_of_week"),
        ({"schedule_type": "MONTHLY", "time_of_day": "06:00", "day_of_month": 0}, "day_of_month"),
        ({"schedule_type": "HOURLY"}, "schedule_type"),
        ({"max_retries": 11}, "max_retries"),
        ({"specific_audit_configs": ["x"]}, "an audit config id is a number, not 'x'"),
        ({"specific_audit_configs": [0]}, "each from 1"),
        ({"specific_audit_configs": ["9" * 30]}, "each from 1"),
        ({"specific_audit_configs": [True]}, "a list of audit config ids"),
        ({"notify_emails": ["nobody"]}, "not a mail address"),
        ({"transcription_priority": "urgent"}, "transcription_priority"),
        ({"catch_up": "all"}, "catch_up"),
        ({"name": " "}, "name"),
        ({"external_api_key": ""}, "external_api_key"),
        ({"owner": "me"}, "owner"),
    ],
)
def test_a_plan_that_lacks_what_its_type_needs_or_has_what_it_does_not_is_refused(given, said):
    with pytest.raises(ValidationError) as refused:
        Plan.model_validate({**PLAN, **given})
    assert said in readable(refused.value)


def test_sunday_has_two_numbers_and_configs_two_spellings():
    given = {"name": "n", "scheduleType": "WEEKLY", "timeOfDay": "06:00", "dayOfWeek": 7}
    more = {"ficheSelection": {"mode": "manual"}, "specificAuditConfigs": ["3", 9223372036854775807, 3]}
    plan = Plan.model_validate(given | more)
    assert (plan.day_of_week, plan.specific_audit_configs) == (0, [3, 9223372036854775807])


@pytest.mark.parametrize(("day", "number"), [("monday", 1), ("SUN", 0), ("Sat", 6), (3, 3), (7, 0)])
def test_a_day_of_the_week_has_a_name_and_a_number(day, number):
    weekly = {**PLAN, "schedule_type": "WEEKLY", "time_of_day": "06:00"}
    assert Plan.model_validate({**weekly, "day_of_week": day}).day_of_week == number
    assert Changes.model_validate({"day_of_week": day}).day_of_week == number
    for wrong in ("mo", "1", "", "8"):
        with pytest.raises(ValidationError) as refused:
            Plan.model_validate({**weekly, "day_of_week": wrong})
        assert f"such as monday, or its number, not {wrong!r}" in readable(refused.value)


def test_a_cron_expression_is_a_type_and_without_one_a_schedule_is_manual():
    bare = {"name": "n", "fiche_selection": {"date_range": "yesterday"}}
    assert Plan.model_validate(bare).schedule_type == "MANUAL"
    for spelling in ("cron_expression", "cronExpression"):
        assert Plan.model_validate({**bare, spelling: "@daily"}).schedule_type == "CRON"
        daily = Plan.model_validate({**bare, "schedule_type": "DAILY", "time_of_day": "06:00"})
        after = Plan.model_validate(changed(daily, Changes.model_validate({spelling: "@hourly"})))
        assert (after.schedule_type, after.time_of_day, after.cron) == ("CRON", None, "@hourly")
    with pytest.raises(ValidationError) as refused:
        Plan.model_validate({"name": "n"})
    assert "fiche_selection: select fiches by the days of their sales" in readable(refused.value)


@pytest.mark.parametrize(
    ("cron", "times"),
    [
        ("0 6 * * *", {"schedule_type": "DAILY", "time_of_day": "06:00", "cron_expression": None}),
        ("0 7 * * *", {"schedule_type": "CRON", "time_of_day": None, "cron_expression": "0 7 * * *"}),
        (None, {"schedule_type": "MANUAL", "time_of_day": None, "cron_expression": None}),
    ],
)
def test_times_stay_as_they_are_written_while_they_say_the_same(cron, times):
    daily = Plan.model_validate({**PLAN, "schedule_type": "DAILY", "time_of_day": "06:00"})
    assert times_of(daily, cron) == {**times, "day_of_week": None, "day_of_month": None}


def test_a_change_of_type_drops_the_fields_of_the_former_and_keeps_what_both_need():
    weekly = Plan.model_validate({**PLAN, "schedule_type": "WEEKLY", "time_of_day": "06:00", "day_of_week": 1})

    def after(**changes):
        return Plan.model_validate(changed(weekly, Changes.model_validate(changes)))

    daily = after(schedule_type="DAILY")
    assert (daily.schedule_type, daily.time_of_day, daily.day_of_week) == ("DAILY", "06:00", None)
    assert after(schedule_type="MANUAL").time_of_day is None
    assert after(schedule_type="WEEKLY") == weekly
    assert after(fiche_selection={"fiche_ids": "5"}).fiche_selection.fiche_ids == ["5"]
    for wrong in ({"schedule_type": "MONTHLY"}, {"time_of_day": None}, {"day_of_month": 3}):
        with pytest.raises(ValidationError):
            after(**wrong)


@pytest.mark.parametrize("wrong", [{"name": None}, {"is_active": None}, {"fiche_selection": None}, {"id": 3}])
def test_a_change_to_nothing_is_refused_where_there_must_be_something(wrong):
    with pytest.raises(ValidationError):
        Changes.model_validate(wrong)


def test_a_key_is_never_printed():
    plan = Plan.model_validate({**PLAN, "external_api_key": "hunter2"})
    assert "hunter2" not in f"{plan!r} {plan} {plan.model_dump()} {plan.model_dump_json()}"
