"""Filters in the address of a page: one that is misspelled or not valid gets a page that says so, never all rows."""

from __future__ import annotations

import re

import pytest

from ecluse.access.door import PERMISSION
from tests.support.pages import FORMS, page_routes, text


@pytest.mark.parametrize(
    ("question", "said"),
    {
        "from=2026-13-45": "from: there is no such query parameter here (known: all, flow, offset, parent, schedule,",
        "schedule_id=abc": "schedule_id: there is no such query parameter here",
        "scheduel=7": "did you mean schedule?",
        "cursor=zzz&flow=test": "cursor: there is no such query parameter here",
        "since=2026-13-45": "since: This should be a valid date or datetime, month value is outside",
        "until=yesterday": "until: ",
    }.items(),
)
def test_a_filter_that_is_not_valid_gets_a_page_that_names_it_and_shows_no_runs(reader, ended_run, question, said):
    run_id = ended_run(("t", "successful", None, None))
    answer = reader.get(f"/ui/runs?{question}")
    assert answer.status == 422
    assert said in text(answer)
    assert f"#{run_id}" not in text(answer)
    assert reader.get(f"/ui/runs/live?{question}").status == 422


def test_every_page_and_every_stream_refuses_a_parameter_that_it_does_not_know(reader):
    guarded = [
        route
        for route in page_routes(reader.client.app)
        if PERMISSION in (route.openapi_extra or {}) and not route.path.startswith(FORMS)
    ]
    asked = {re.sub(r"\{[^}]*\}", "1", route.path) for route in guarded}
    assert asked >= {"/ui/runs", "/ui/lanes", "/ui/audits", "/ui/jobs/servers", "/ui/connections/notifications/live"}
    answers = {path: reader.get(f"{path}?zzz=1") for path in asked}
    assert {path for path, answer in answers.items() if answer.status != 422} == set()
    assert {path for path, answer in answers.items() if "zzz: there is no such" not in text(answer)} == set()
