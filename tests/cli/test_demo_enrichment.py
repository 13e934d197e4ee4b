"""The demonstration of company enrichment: every case ends as it must, with no call too many, although a server is
killed."""

from __future__ import annotations

import json

import pytest

from ecluse.demo import enrichment
from tests.support.demos import PATIENCE

pytestmark = pytest.mark.long


@pytest.mark.timeout(2 * PATIENCE)
def test_eight_cases_end_as_expected_with_the_calls_that_they_need(demo):
    played = demo("enrichment", "--json")
    assert played.end() == 0, played.said
    report = json.loads(played.out[-1])
    assert [one["case"] for one in report["cases"]] == list(enrichment.EXPECTED)
    assert enrichment.as_expected(report), report
    assert report["cases"][2]["answered"] == "STALE"
    assert "its completion event goes to the tenants default, second" in played.said
    assert "kill -9 of the server, on purpose" in played.said
    assert played.left() == []


def case(name, **changed):
    status, called, error = enrichment.EXPECTED[name]
    return {"case": name, "status": status, "sources_called": called, "enrichment_error": error, **changed}


@pytest.mark.parametrize(
    ("changed", "verify", "fine"),
    [
        ({}, "clean", True),
        ({"status": "FAILED"}, "clean", False),
        ({"sources_called": {}}, "clean", False),
        ({}, [{}], False),
    ],
)
def test_only_what_was_expected_is_a_success(changed, verify, fine):
    cases = [case(name, **(changed if name == "cold" else {})) for name in enrichment.EXPECTED]
    assert enrichment.as_expected({"cases": cases, "verify": verify}) is fine
