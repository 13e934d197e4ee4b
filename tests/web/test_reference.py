"""The reference for programmers: `/docs` in a real browser, and the page of error codes."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from ecluse.access.error_codes import REFUSALS
from ecluse.insight.outcome_codes import FAILURES
from ecluse.web.authentication import HEADERS
from tests.web.conftest import AXE, PATIENCE

pytestmark = pytest.mark.long


# Swagger UI takes seconds of computing before it shows anything, more on a busy machine.
@pytest.fixture(autouse=True)
def _patience():
    expect.set_options(timeout=3 * PATIENCE * 1000)
    yield
    expect.set_options(timeout=5_000)


@pytest.mark.timeout(400)
def test_an_operation_is_expanded_and_says_what_it_needs_and_answers(reader, visit):
    visitor = visit(reader.client)  # no key; at the end the browser must not have complained of the policy
    foreign: list[str] = []
    visitor.page.on("request", lambda one: foreign.append(one.url) if not one.url.startswith(visitor.base) else None)
    answer = visitor.go("/docs")
    assert answer.headers["content-security-policy"] == HEADERS["Content-Security-Policy"]
    visitor.page.set_default_timeout(3 * PATIENCE * 1000)
    visitor.page.locator("#operations-tag-runs").click()
    operation = visitor.page.locator("#operations-runs-end_run")
    expect(operation).to_contain_text("/api/runs/{run_id}/end")
    operation.get_by_role("button").first.click()
    expect(operation).to_contain_text("Id of the run.")
    expect(operation).to_contain_text("The run had ended already; nothing was changed.")
    assert [one for one in foreign if not one.startswith("data:")] == []


def test_a_problem_leads_to_the_row_that_explains_its_code(reader, visit):
    answer = reader.with_key(None).get("/api/runs", Accept="application/problem+json")
    assert (answer.status, answer.headers["Content-Type"]) == (401, "application/problem+json")
    page = visit(reader.client).page
    page.goto(f"http://127.0.0.1:{reader.client.port}{answer.json['type']}")
    row = page.locator(":target")
    expect(row).to_contain_text("UNAUTHENTICATED")
    expect(row).to_contain_text(answer.json["title"])
    page.evaluate(AXE.read_text())
    assert page.evaluate("axe.run().then(found => found.violations.map(one => one.id))") == []


def test_the_page_has_every_code_once(reader):
    body = reader.with_key(None).get("/docs/errors").body.decode()
    assert re.findall(r'<tr id="([^"]+)">', body) == [*sorted(REFUSALS), *(f"item-{one}" for one in sorted(FAILURES))]
