"""An operator's browser: log in, watch a run to its end without touching anything, on any screen."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import ExitStack
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import psycopg
import pytest
from playwright.sync_api import expect

from ecluse.engine import ROLES, NewSchedule, create_schedule, pause_lane, resume_lane
from hello_flow import FLOW as HELLO
from tests.support.api_server import FLOW, add_tenant, new_key, serving
from tests.support.waits import wait_for
from tests.web.conftest import AXE, LAPTOP, PATIENCE, PHONE, aside

pytestmark = pytest.mark.long

EVIL = "<img src=x onerror=\"document.title='taken over'\">"


@pytest.fixture(scope="module", autouse=True)
def _patience():
    expect.set_options(timeout=PATIENCE * 1000)
    yield
    expect.set_options(timeout=5_000)


@pytest.fixture(scope="module")
def desk(databases, sandbox_server):
    """A server that works, with the example flow and a schedule of it; its API with an operator's key."""
    sandbox_server.reset()
    with ExitStack() as stack:
        dsn = stack.enter_context(databases.one())
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("PRICE_LIST_URL", f"{sandbox_server.url}/price-list")
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(HELLO.schema)
        add_tenant(dsn, "rival")
        client = stack.enter_context(serving(dsn, HELLO, FLOW, roles=ROLES, ECLUSE_HANDS=5))
        yield client.with_key(aside(new_key, dsn)), dsn


async def nightly(dsn):
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        return await create_schedule(connection, NewSchedule(HELLO, "nightly", "30 2 * * *", "Europe/Paris"))


@pytest.fixture(scope="module")
def schedule_id(desk):
    return aside(lambda: asyncio.run(nightly(desk[1])))


@pytest.fixture(scope="module")
def ended(desk):
    """A run that is over, with a success, a failure and an unfriendly name."""
    client, _ = desk
    given = {"flow": "hello", "input": {"skus": ["SKU-00001", EVIL, "UNKNOWN-" + "x" * 200]}}
    run_id = client.post("/api/runs", given).json["run_id"]
    wait_for(lambda: client.get(f"/api/runs/{run_id}").json["ended_at"])
    return run_id


@pytest.fixture
def waiting(desk):
    """A run whose work has to wait, for as long as the test lasts."""
    client, dsn = desk

    def switch(how):
        async def ask():
            async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
                await how(connection, "price-list", reason="a test", by="a test")

        aside(lambda: asyncio.run(ask()))

    switch(pause_lane)
    run_id = client.post("/api/runs", {"flow": "hello", "input": {"articles": 30}}).json["run_id"]
    wait_for(lambda: client.get(f"/api/runs/{run_id}").json["stages"])
    yield run_id, lambda: switch(resume_lane)
    switch(resume_lane)
    wait_for(lambda: client.get(f"/api/runs/{run_id}").json["ended_at"])


def test_a_run_is_watched_from_its_beginning_to_its_end_and_nobody_reloads(desk, visit, waiting):
    client, _ = desk
    run_id, go_on = waiting
    page = visit(client).enter(client.key)
    expect(page.get_by_role("status")).to_have_text("Live")
    page.evaluate("window.stillHere = true")
    row = page.locator(f"#run-{run_id}")
    expect(row.get_by_text("running", exact=True)).to_be_visible()
    expect(row).to_contain_text("read 0 of 30 (0 %)")
    later = client.post("/api/runs", {"flow": "test", "input": {"targets": ["a"]}}).json["run_id"]
    expect(page.locator(f"#run-{later}").get_by_text("completed", exact=True)).to_be_visible()
    assert page.evaluate("window.stillHere")

    row.get_by_role("link", name="hello").click()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"hello #{run_id}")
    expect(page.get_by_role("status")).to_have_text("Live")
    page.evaluate("window.stillHere = true")
    expect(page.locator(".verdict")).to_have_text("running reading")
    expect(page.get_by_role("table", name="Stages")).to_contain_text("until 20")
    expect(page).to_have_title(f"0 % · hello #{run_id}")
    page.get_by_text("Input and keys").click()
    go_on()
    expect(page.locator(".verdict")).to_have_text("completed")
    expect(page.locator(".card")).to_contain_text("30 successful, 0 failed, 0 ignored of 30")
    expect(page.get_by_role("table", name="Stages")).to_contain_text("done")
    expect(page.get_by_role("list", name="Outcomes by reason")).to_contain_text("30 successful")
    expect(page.get_by_role("table", name="Outcomes")).to_contain_text("SKU-00001")
    expect(page.get_by_role("list", name="Log of the run")).to_contain_text("running -> completed")
    expect(page).to_have_title(f"completed · hello #{run_id}")
    expect(page.locator("#pulse")).to_be_hidden()
    assert page.evaluate("window.stillHere"), "the page was loaded anew"
    expect(page.get_by_text('"articles": 30')).to_be_visible()  # what was unfolded still is


def test_a_wrong_key_is_told_so_and_the_right_one_leads_where_one_wanted_to_go(desk, visit, schedule_id):
    client, _ = desk
    visitor = visit(client)
    visitor.expected = ("401",)
    page = visitor.page
    visitor.go("/ui/schedules")
    page.get_by_label("API key").fill("ecl_wrong")
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_contain_text("not known here")
    expect(page.get_by_label("API key")).to_be_focused()
    page.get_by_label("API key").fill(client.key)
    page.get_by_role("button", name="Log in").click()
    expect(page).to_have_url(f"{visitor.base}/ui/schedules")
    page.get_by_role("link", name="nightly").click()
    expect(page.get_by_role("table", name="Next due times").get_by_role("row")).to_have_count(11)
    page.get_by_role("button", name="Log out").click()
    expect(page).to_have_url(f"{visitor.base}/ui/login")
    visitor.go("/ui/runs")
    expect(page.get_by_role("heading", level=1)).to_have_text("Log in")


def test_names_that_are_markup_stay_names(desk, visit, ended):
    client, _ = desk
    page = visit(client).enter(client.key, f"/ui/runs/{ended}")
    expect(page.get_by_role("rowheader", name=EVIL)).to_be_visible()
    expect(page).to_have_title(re.compile(rf"^completed · .*hello #{ended}$"))


def test_a_page_whose_key_is_revoked_says_so(desk, visit, paced):
    client, dsn = desk
    paced(client, quiet=0.2)
    key = aside(new_key, dsn)
    page = visit(client).enter(key, "/ui/schedules")
    expect(page.get_by_role("status")).to_have_text("Live")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("UPDATE api_keys SET revoked_at = ecluse_now() WHERE hint = %s", (key[:8],))
    expect(page.get_by_role("alert")).to_contain_text("no longer valid")
    expect(page.locator("#pulse")).to_be_hidden()


def test_who_follows_a_link_in_a_mail_need_not_log_in_again(desk, visit, ended):
    client, _ = desk

    class Mail(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            link = f"<link rel=icon href=data:,><a href='http://127.0.0.1:{client.port}/ui/runs/{ended}'>your run</a>"
            self.wfile.write(link.encode())

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Mail) as elsewhere:
        Thread(target=elsewhere.serve_forever).start()
        page = visit(client).log_in(client.key)
        page.goto(f"http://localhost:{elsewhere.server_port}/")
        page.get_by_text("your run").click()
        expect(page.get_by_role("heading", level=1)).to_have_text(f"hello #{ended}")
        elsewhere.shutdown()


def test_a_page_outlives_its_server_and_is_live_again_with_the_next(dsn, visit):
    key = aside(new_key, dsn)
    with serving(dsn, FLOW) as client:
        visitor = visit(client)
        visitor.expected = ("ERR_CONNECTION", "ERR_EMPTY_RESPONSE", "htmx:sse:error")
        page = visitor.enter(key)
        expect(page.get_by_role("status")).to_have_text("Live")
        page.evaluate("window.stillHere = true")
    expect(page.get_by_role("status")).to_have_text("Connection lost, reconnecting")
    with serving(dsn, FLOW, port=client.port) as client:
        run_id = client.with_key(key).post("/api/runs", {"flow": "test"}).json["run_id"]
        expect(page.get_by_role("status")).to_have_text("Live")
        expect(page.locator(f"#run-{run_id}")).to_be_visible()
        assert page.evaluate("window.stillHere")
        page.close()


@pytest.mark.parametrize("script", ["hx-sse", "live"])
def test_a_page_is_live_however_late_a_script_arrives(desk, visit, script):
    client, _ = desk

    def late(route):
        time.sleep(0.3)
        route.continue_()

    visitor = visit(client)
    visitor.page.route(re.compile(rf"/{script}\b.*\.js"), late)
    page = visitor.enter(client.key)
    expect(page.get_by_role("status")).to_have_text("Live")


def test_a_page_that_a_limit_refuses_its_stream_names_the_limit_and_is_live_when_there_is_room(
    desk, visit, ended, monkeypatch
):
    client, _ = desk
    expect(visit(client).enter(client.key).get_by_role("status")).to_have_text("Live")
    limits = client.app.state.limits
    allowed = limits.allowed
    monkeypatch.setattr(limits, "allowed", replace(allowed, tenant_page_streams=1))
    visitor = visit(client)
    visitor.expected = ("429", "htmx:response:error")
    page = visitor.enter(client.key)
    says = "Not live. This tenant has 1 open page streams, as many as allowed (tenant_page_streams)."
    expect(page.get_by_role("status")).to_have_text(f"{says} The page tries again in 10 s.")
    expect(page.locator(f"#run-{ended}")).to_be_visible()
    monkeypatch.setattr(limits, "allowed", allowed)
    expect(page.get_by_role("status")).to_have_text("Live", timeout=30_000)


def test_the_pages_do_without_scripts(desk, visit, ended):
    client, _ = desk
    page = visit(client, java_script_enabled=False).enter(client.key)
    page.get_by_label("Flow").select_option("hello")
    page.get_by_role("button", name="Filter").click()
    page.locator(f"#run-{ended}").get_by_role("link", name="hello").click()
    expect(page.locator(".verdict")).to_have_text("completed")


def test_every_page_is_accessible_and_fits_its_screen_in_light_and_dark(desk, visit, ended, waiting):
    client, _ = desk
    chosen = {"mode": "date_range", "date_range": "yesterday", "groupes": ["G" * 200]}
    daily = {"name": "daily", "schedule_type": "DAILY", "time_of_day": "06:30", "fiche_selection": chosen}
    automated = client.post("/api/automation/schedules", daily).json["id"]
    visitor = visit(client, reduced_motion="reduce")  # or colours are measured half-way from light to dark
    visitor.expected = ("404",)
    page = visitor.page
    # test_browser_actions.py looks at the other pages in the same way.
    paths = [f"/ui/runs/{ended}?outcome=ignored", f"/ui/runs/{waiting[0]}", "/ui/runs?state=expired"]
    paths += [f"/ui/schedules/{automated}", "/ui/nowhere"]
    found = []
    for path in ["/ui/login", *paths]:
        if path == paths[0]:
            visitor.admit(client.key)
        visitor.go(path)
        page.evaluate(AXE.read_text())
        for screen, scheme, rules in ((LAPTOP, "light", "{}"), (PHONE, "dark", "{runOnly: ['color-contrast']}")):
            page.set_viewport_size(screen)
            page.emulate_media(color_scheme=scheme)
            result = page.evaluate(f"axe.run({rules})")
            assert result["passes"]
            found += [
                f"{path} {scheme} {one['id']} {node['html']}" for one in result["violations"] for node in one["nodes"]
            ]
            wide, room = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
            assert wide <= room, f"{path} has to be moved sideways on {screen}"
        skip = page.get_by_role("link", name="Skip to the content")
        skip.focus()
        expect(skip).to_be_in_viewport()
    assert not found, "\n".join(found)
