"""Errors as problem details (RFC 9457), for callers that ask for them."""

from __future__ import annotations

import pytest

from ecluse.access.envelope import LARGEST_BODY, Problem
from ecluse.access.error_codes import REFUSALS

ASKED = {"Accept": "application/json, application/problem+json"}


@pytest.mark.parametrize(
    ("method", "path", "body", "code"),
    [
        ("GET", "/api/nothing", None, "NOT_FOUND"),
        ("GET", "/nothing", None, "NOT_FOUND"),
        ("GET", "/api/runs/999", None, "NOT_FOUND"),
        ("PUT", "/api/runs", None, "METHOD_NOT_ALLOWED"),
        ("POST", "/api/runs", b"{", "NOT_JSON"),
        ("POST", "/api/runs", b" " * (LARGEST_BODY + 1), "BODY_TOO_LARGE"),
        ("POST", "/api/runs", b'{"flow": 7}', "INVALID_INPUT"),
    ],
)
def test_every_kind_of_error_is_a_problem_when_asked_for(shared_api, method, path, body, code):
    answer = shared_api.ask(method, path, raw=body, headers=ASKED)
    assert answer.headers["Content-Type"] == "application/problem+json"
    problem = Problem.model_validate(answer.json)
    assert set(answer.json) == set(Problem.model_fields)
    assert answer.status == problem.status == REFUSALS[code].status
    assert (problem.code, problem.type, problem.title) == (code, f"/docs/errors#{code}", REFUSALS[code].meaning)
    assert problem.detail[0].isupper() or problem.detail.startswith("body.")
    assert problem.instance == path
    assert problem.request_id == answer.headers["X-Request-Id"]
    assert [one.where for one in problem.errors or []] == (["body.flow"] if code == "INVALID_INPUT" else [])


def test_a_failure_of_the_server_is_one_too(api, query):
    query("ALTER TABLE runs RENAME TO lost")
    answer = api.get("/api/runs", headers=ASKED)
    assert (answer.status, answer.json["code"]) == (500, "INTERNAL")
    assert answer.headers["Content-Type"] == "application/problem+json"


@pytest.mark.parametrize("accept", [None, "*/*", "application/json", "application/problem+json;q=0", "text/html"])
def test_other_callers_get_the_usual_shape(shared_api, accept):
    answer = shared_api.get("/api/runs/999", headers={"Accept": accept} if accept else {})
    assert answer.code == "NOT_FOUND"
    assert "Accept" in answer.headers["Vary"].split(", ")
