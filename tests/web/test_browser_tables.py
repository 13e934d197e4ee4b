"""Tables on a wide screen, a narrow window and a phone: words stay whole, and a table that does not fit scrolls by
itself, not with the page."""

from __future__ import annotations

import pytest

from tests.web.conftest import PHONE

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
