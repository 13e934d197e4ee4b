"""Tables on a wide screen, a narrow window and a phone: words stay whole, and a table that does not fit scrolls by
itself, not with the page."""

from __future__ import annotations

import pytest

from tests.support.api_server import new_key
from tests.web.conftest import LAPTOP, PHONE, aside

pytestmark = pytest.mark.long
WIDE, WINDOW = {"width": 1440, "height": 900}, {"width": 700, "height": 900}
ERROR = "API_RECHERCHE_ENTREPRISES:200:NOT_FOUND|INPI_RNE:404:NOT_FOUND|API_ENTREPRISE_RCS:503:TIMEOUT"
REQUEST = """
WITH company AS (
    INSERT INTO companies (siren, enrichment_status, core_identity_present, sources_success_count,
                           required_sources_failed_count, optional_sources_failed_count, legal_name, enrichment_error,
                           created_at, updated_at, status_at, job_ended_at)
    VALUES ('552049447', 'FAILED', true, 0, 1, 2, %s, %s, ecluse_now(), ecluse_now(), ecluse_now(), ecluse_now()))
INSERT INTO requests (tenant_id, company_siren, correlation_id, created_by, created_at, updated_at)
VALUES ('default', '552049447', '', 'administrator', ecluse_now(), ecluse_now())
"""
# Deliveries to a webhook and a mail address: one has failed, one has arrived, one waits for its next attempt.
DELIVERIES = """
WITH given (state, kind, recipient, event, error_code, error) AS (VALUES
    ('failed', 'webhook', 'https://hooks.operations.example.com/…', 'transcription/completed', 'WEBHOOK_REFUSED',
     'the receiver answered 410 Gone: no message is sent to it any more'),
    ('succeeded', 'mail', 'operations@example.com', 'pricing.alert.critical.raised', NULL, NULL),
    ('running', 'webhook', 'https://hooks.operations.example.com/…', 'automation/completed', 'WEBHOOK_FAILED',
     'the receiver answered 503 Service Unavailable')),
made AS (
    INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, error_code, reason, correlation_id,
                      created_at, started_at, ended_at, end_cause, selected, successful, failed, ignored)
    SELECT 'default', 'notifications', event, false,
           CASE state WHEN 'succeeded' THEN 'completed' ELSE state END, state, error_code, error, '', ecluse_now(),
           ecluse_now(), CASE WHEN state <> 'running' THEN ecluse_now() END,
           CASE WHEN state <> 'running' THEN 'normal' END, 0, 0, 0, 0 FROM given RETURNING id, event_key),
waits AS (
    INSERT INTO items (tenant_id, run_id, flow, stage, key, target, lane_id, due_at, executions, error_code, error)
    SELECT 'default', made.id, 'notifications', 'send', '1', '1', 0, ecluse_now() + interval '1 day', 4, error_code,
           error FROM made JOIN given ON event = event_key WHERE state = 'running')
INSERT INTO deliveries (run_id, tenant_id, endpoint_id, kind, recipient, event_key, event_type, message, created_at)
SELECT made.id, 'default', 1, kind, recipient, event, event, '{}', ecluse_now()
FROM made JOIN given ON event = event_key
"""
# The words in cells that are on more than one line.
BROKEN = r"""() => {
    const found = [], range = document.createRange();
    for (const cell of document.querySelectorAll("th, td")) {
        const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
        while (walker.nextNode()) for (const word of walker.currentNode.data.matchAll(/[\p{L}\p{N}_.]+/gu)) {
            range.setStart(walker.currentNode, word.index);
            range.setEnd(walker.currentNode, word.index + word[0].length);
            const lines = new Set([...range.getClientRects()].filter(one => one.width > 0.5).map(one => one.top));
            if (lines.size > 1) found.push(word[0]);
        }
    }
    return found;
}"""
OVER = "one => [one.scrollWidth > one.clientWidth, document.documentElement.scrollWidth > innerWidth]"


def test_words_of_a_table_stay_whole_and_it_scrolls_by_itself(reader, visit, fill):
    fill(REQUEST, "SOCIÉTÉ D'ÉLECTRIFICATION INTERDÉPARTEMENTALE DE SAINT-GERMAIN-EN-LAYE", ERROR)
    page = visit(reader.client, viewport=WIDE).enter(reader.key, "/ui/requests")
    table = page.locator(".overflow-auto").first
    assert "administrator" in table.inner_text()
    for screen, scrolls in ((WIDE, False), (WINDOW, True), (PHONE, False)):
        page.set_viewport_size(screen)
        assert page.evaluate(BROKEN) == [], screen
        assert table.evaluate(OVER) == [scrolls, False], screen


def test_a_word_that_no_column_has_room_for_is_broken(reader, visit, ended_run):
    run_id = ended_run(("x" * 200, "failed", "NO_URL", "y" * 300), status="failed", state="failed")
    page = visit(reader.client, viewport=WIDE).enter(reader.key, f"/ui/runs/{run_id}")
    table = page.locator(".overflow-auto", has=page.get_by_role("table", name="Outcomes"))
    assert table.evaluate(OVER) == [False, False]
    assert set(page.evaluate(BROKEN)) == {"x" * 200, "y" * 300}


def test_deliveries_with_their_errors_and_actions_fit_a_laptop(reader, pages_dsn, visit, fill):
    fill(DELIVERIES)
    operator = aside(new_key, pages_dsn)
    page = visit(reader.client, viewport=LAPTOP).enter(operator, "/ui/connections/notifications")
    deliveries = page.get_by_role("table", name="Deliveries")
    assert deliveries.get_by_role("button", name="Deliver again").count() == 2
    assert page.locator(".overflow-auto", has=deliveries).evaluate(OVER) == [False, False]
    assert page.evaluate(BROKEN) == []
    assert "next attempt" in deliveries.inner_text()
