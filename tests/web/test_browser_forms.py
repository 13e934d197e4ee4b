"""Forms in a browser, with scripts and without: every button leads to its form, and the form does what it says."""

from __future__ import annotations

import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from playwright.sync_api import expect

from tests.support.api_server import new_key
from tests.web.conftest import PATIENCE, aside

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", autouse=True)
def _patience():
    expect.set_options(timeout=PATIENCE * 1000)
    yield
    expect.set_options(timeout=5_000)


@pytest.fixture(scope="module")
def key(pages_dsn):
    return aside(new_key, pages_dsn, "admin")


@pytest.fixture(params=[True, False], ids=["scripts", "no scripts"])
def desk(request, reader, visit, key):
    """The pages in the eyes of an administrator, with scripts and without."""
    visitor = visit(reader.client, java_script_enabled=request.param)
    visitor.admit(key)
    visitor.scripts = request.param
    return visitor


def done(page, text):
    """What was done is said, and once only."""
    expect(page.locator("#done")).to_contain_text(text)
    page.reload()
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    expect(page.locator("#done")).to_have_count(0)


def test_a_config_is_made_changed_and_deleted(desk, fill):
    page, name = desk.page, f"Config {desk.scripts}"
    desk.go("/ui/audits")
    page.get_by_role("button", name="New config").click()
    page.get_by_label("Name").first.fill(name)
    page.get_by_role("group", name="1").get_by_label("Name").fill("Consent")
    page.get_by_role("group", name="1").get_by_label("Criteria").fill("The customer agrees.\nOut loud.")
    page.get_by_role("button", name="More rows").click()
    page.get_by_role("group", name="2").get_by_label("Name").fill("Consent")
    page.get_by_role("group", name="2").get_by_label("Criteria").fill("The price is named.")
    desk.expected = ("422", "409")
    page.get_by_role("button", name="New config").click()
    expect(page.get_by_role("alert")).to_contain_text("Nothing was changed")
    expect(page.get_by_text("each step has a name of its own; twice: Consent")).to_be_visible()
    expect(page.get_by_label("Name").first).to_have_value(name)
    page.get_by_role("group", name="2").get_by_label("Name").fill("Price")
    page.get_by_role("button", name="New config").click()
    done(page, "The config was created.")
    made = fill("SELECT id FROM audit_configs WHERE name = %s", name)
    assert fill("SELECT steps -> 0 ->> 'criteria' FROM audit_configs WHERE id = %s", made) == (
        "The customer agrees.\nOut loud."
    )

    row = page.locator(f"#config-{made}")
    row.get_by_role("button", name="Edit").click()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Edit audit config {name}")
    fill("UPDATE audit_configs SET description = 'by another' WHERE id = %s", made)
    page.get_by_label("Run automatically").check()
    page.get_by_role("button", name="Edit").click()
    expect(page.get_by_role("alert")).to_contain_text("has changed since this form was shown")
    expect(page.get_by_label("Description")).to_have_value("by another")
    page.get_by_label("Run automatically").check()
    page.get_by_role("button", name="Edit").click()
    done(page, "The config was saved.")
    assert fill("SELECT run_automatically FROM audit_configs WHERE id = %s", made)

    row.get_by_role("button", name="Delete").click()
    expect(page.get_by_text(f"Audit config {made} is deleted, for good.")).to_be_visible()
    page.get_by_role("button", name="Delete").click()
    done(page, "The config was deleted.")
    expect(row).to_have_count(0)
    actions = "SELECT string_agg(action, ' ' ORDER BY id) FROM audit_trail WHERE subject = 'audit_config:' || %s"
    assert fill(actions, made) == "audit_config.create audit_config.update audit_config.delete"


def test_a_form_that_another_site_submits_does_nothing(reader, visit, key, fill):
    name = "From elsewhere"

    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            action = f"http://127.0.0.1:{reader.client.port}/ui/do/create_config"
            fields = {"name": name, "steps.0.name": "x", "steps.0.criteria": "x", "_token": "x"}
            inputs = "".join(f"<input name='{one}' value='{value}'>" for one, value in fields.items())
            page = f"<link rel=icon href=data:,><form method=post action='{action}'>{inputs}<button>go</button></form>"
            self.wfile.write(page.encode())

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as elsewhere:
        Thread(target=elsewhere.serve_forever).start()
        visitor = visit(reader.client)
        visitor.expected = ("403",)
        page = visitor.log_in(key)
        page.goto(f"http://localhost:{elsewhere.server_port}/")
        with page.expect_response(re.compile("/ui/do/")) as answered:
            page.get_by_role("button", name="go").click()
        assert answered.value.status == 403
        elsewhere.shutdown()
    assert fill("SELECT count(*) FROM audit_configs WHERE name = %s", name) == 0


def test_times_are_in_the_readers_zone_and_utc_without_scripts(reader, visit, key, ended_run):
    run_id = ended_run()
    page = visit(reader.client, timezone_id="Asia/Tokyo").enter(key, f"/ui/runs/{run_id}")
    began = page.locator("time").first
    expect(began).to_have_text("2026-03-02 19:00:00")
    expect(began).to_have_attribute("title", "2026-03-02 10:00:00 UTC")
    expect(page.locator("footer")).to_have_text("Times are in Asia/Tokyo, with UTC in their tooltips.")
    expect(page.locator("#zone-note")).to_be_visible()
    plain = visit(reader.client, timezone_id="Asia/Tokyo", java_script_enabled=False).enter(key, f"/ui/runs/{run_id}")
    expect(plain.locator("time").first).to_have_text("2026-03-02 10:00:00")
    expect(plain.locator("#zone")).to_have_text("UTC")
    expect(plain.locator("#zone-note")).to_be_hidden()


def test_filters_apply_at_once_and_are_in_the_address(desk, ended_run):
    page, target = desk.page, f"find-me-{desk.scripts}"
    wanted = ended_run((target, "successful", None, None), flow="test")
    other = ended_run(("other", "failed", "BAD", "bad"), flow="other", status="failed", state="failed")
    desk.go("/ui/runs?all=1")
    expect(page.locator(f"#run-{other}")).to_be_visible()
    page.get_by_label("Flow").select_option("test")
    if not desk.scripts:
        page.get_by_role("button", name="Filter").click()
    expect(page.locator(f"#run-{other}")).to_have_count(0)
    expect(page.locator(f"#run-{wanted}")).to_be_visible()
    assert "flow=test" in page.url
    if desk.scripts:
        assert "state" not in page.url
        expect(page.get_by_label("Flow")).to_be_focused()
    page.get_by_label("Target", exact=True).fill(target)
    page.get_by_label("Target", exact=True).press("Enter")
    expect(page.locator("tr[id^=run-]")).to_have_count(1)
    for day, found in (("2026-03-02", 1), ("2026-03-03", 0)):
        desk.go(f"/ui/runs?target={target}&since={day}")
        expect(page.locator("tr[id^=run-]")).to_have_count(found)
    desk.go(f"/ui/runs?target={target}&until=2026-03-01")
    expect(page.get_by_text("No matching runs")).to_be_visible()


def test_a_target_is_found_from_every_page_and_shown_in_full(desk, ended_run):
    page, target = desk.page, f"F/17 {desk.scripts}<b>"
    run_id = ended_run((target, "failed", "NO_URL", "no URL"), status="failed", state="failed")
    desk.go("/ui/schedules")
    page.get_by_role("searchbox", name="Find a target").fill(target)
    page.get_by_role("searchbox", name="Find a target").press("Enter")
    page.get_by_role("link", name=f"#{run_id}").click()
    expect(page.get_by_role("heading", level=1)).to_have_text(target)
    expect(page.get_by_text("A redrive fails again until the record is corrected in the CRM.")).to_be_visible()
    page.get_by_role("link", name=f"run #{run_id}").click()
    page.get_by_role("list", name="Failures by reason").get_by_role("link", name=target).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(target)
