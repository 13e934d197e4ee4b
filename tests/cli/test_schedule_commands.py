"""`ecluse schedules …` as an operator uses it."""

from __future__ import annotations

import re

import pytest

FLOW = "hello_flow:FLOW"
CREATE = ("schedules", "create", FLOW, "--name", "nightly", "--cron", "30 2 * * *", "--tz", "Europe/Paris")


@pytest.mark.req("G-28")
def test_a_preview_needs_no_database(bare):
    answer = bare("schedules", "preview", "--cron", "@hourly", "--tz", "Europe/Paris", "-n", "50", DATABASE_URL="no")
    assert (answer.code, answer.err) == (0, "")
    said, *fires = answer.out.splitlines()
    assert "Europe/Paris" in said
    assert len(fires) == 50
    assert all(re.match(r"\w{3} \d{4}-\d\d-\d\d \d\d:00 \+0[12]00", fire) for fire in fires)


def test_a_schedule_is_made_listed_shown_switched_and_deleted(ecluse, one, query):
    assert "no schedules yet" in ecluse("schedules", "list").out
    made = ecluse(*CREATE, "--input", '{"articles": 3}', "--window-start", "02:00", "--window-end", "05:00")
    assert (made.code, made.err) == (0, "")
    schedule = made.json["schedule_id"]
    assert made.json["next_due_at"]

    (line,) = ecluse("schedules", "list").out.splitlines()
    assert line.split()[:4] == [schedule, "default", "hello", "nightly"]
    shown = ecluse("schedules", "show", schedule).json
    assert (shown["cron"], shown["window_end"], shown["input"]["articles"]) == ("30 2 * * *", "05:00", 3)
    assert ecluse("schedules", "preview", schedule, "-n", "3").out.count(" 02:30 ") >= 2

    assert ecluse("schedules", "disable", schedule).json["next_due_at"] is None
    assert " disabled" in ecluse("schedules", "list").out
    assert ecluse("schedules", "enable", schedule).json["next_due_at"]
    fired = ecluse("schedules", "run", schedule, "--flow", FLOW)
    assert fired.code == 0
    assert fired.json["event_key"].startswith(f"schedule:{schedule}:manual-")
    assert one("SELECT id, schedule_id FROM runs") == (int(fired.json["run_id"]), int(schedule))

    assert ecluse("schedules", "delete", schedule).code == 0
    gone = ecluse("schedules", "show", schedule)
    assert (gone.code, gone.err) == (2, f"ecluse: there is no schedule {schedule}\n")
    done = query(
        "SELECT action FROM audit_trail WHERE subject = %s AND actor LIKE 'cli:%%' ORDER BY id", f"schedule:{schedule}"
    )
    assert [action for (action,) in done] == [
        f"schedule.{verb}" for verb in ("create", "disable", "enable", "run", "delete")
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*CREATE, "--cron", "61 * * * *"), "bad minute"),
        ((*CREATE, "--tz", "Europe/Pari"), "did you mean Europe/Paris?"),
        ((*CREATE, "--window-start", "02:00"), "a start and an end"),
        ((*CREATE, "--input", "[]"), "JSON object"),
        ((*CREATE, "--input", '{"articles": "x"}'), "articles"),
        (("schedules", "create", "nobody", "--name", "x"), "no flow 'nobody'"),
        ((*CREATE, "--tenant", "acme"), "There is no tenant 'acme'"),
        (("schedules", "preview", "--cron", "@reboot"), "no such alias"),
        (("schedules", "preview"), "--cron"),
        (("schedules", "show", "4711"), "no schedule 4711"),
        (("schedules", "run", "4711", "--flow", FLOW), "no schedule 4711"),
    ],
)
def test_mistakes_are_answered_in_one_line(ecluse, one, arguments, said):
    answer = ecluse(*arguments)
    assert answer.code == 2
    assert said in answer.err
    assert "Traceback" not in answer.err
    assert one("SELECT count(*) FROM schedules") == 0
