"""Lines of the pages that must stay in one piece, and colours on a tinted ground."""

from __future__ import annotations

import pytest

from tests.support.api_server import new_key
from tests.web.conftest import PHONE, aside, unreadable

pytestmark = pytest.mark.long
WIDE = {"width": 1440, "height": 900}
FAILURE = "HTTP 503 Service Unavailable from the shop: try again, " * 4
LANE = """
INSERT INTO lanes (name, tenant_id, max_in_flight, max_per_key, per_second, burst, trips, failing_since,
                   held_until, held_reason, last_failure)
VALUES (%s, 'default', 1, 1, 1.6667, 40, %s, %s, %s, %s, %s)
"""


@pytest.fixture
def operator(reader, pages_dsn):
    return reader.with_key(aside(new_key, pages_dsn))


def test_names_and_buttons_of_lanes_stay_on_one_line(operator, visit, fill):
    down = (1, "2026-11-18 13:05:03Z", "2099-11-18 13:05:03Z", "outage", FAILURE)
    fill(LANE, "shop/default/project-1", *down)
    fill(LANE, "shop/default/project-2", 0, None, None, None, None)
    page = visit(operator.client, viewport=WIDE).enter(operator.key, "/ui/lanes")
    for row in page.locator("tr[id^=lane-shop-default]").all():
        tops = row.locator(".buttons a").evaluate_all("all => all.map(one => one.getBoundingClientRect().top)")
        assert len(tops) > 1
        assert len(set(tops)) == 1
        name = row.locator("th .lane").evaluate("one => one.getClientRects().length")
        assert name == 1
    page.set_viewport_size(PHONE)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_score_of_an_audit_with_unverified_steps_stays_in_its_column(reader, visit, fill, audited):
    marked, plain = audited("layout-1"), audited("layout-2")
    fill("UPDATE audits SET result = jsonb_set(result, '{steps,0,unverified}', 'true') WHERE id = %s", marked)
    page = visit(reader.client, viewport=WIDE).enter(reader.key, "/ui/audits")
    table = page.get_by_role("table", name="Audits")
    assert table.locator("mark").count() == 1
    for one in (marked, plain):
        row = table.locator("tr", has_text=f"#{one}")
        assert row.locator("td.figure").inner_text() == "90.00"


def test_the_button_that_redrives_one_reason_is_readable(operator, visit, ended_run):
    run = ended_run(("a", "failed", "BAD", "no"), ("b", "failed", "WORSE", "no"), status="failed", state="failed",
                    flow="automation")  # fmt: skip
    page = visit(operator.client, reduced_motion="reduce").enter(operator.key, f"/ui/runs/{run}")
    assert page.locator(".groups .buttons a").count() == 2
    found = unreadable(page)
    assert not found, "\n".join(found)
