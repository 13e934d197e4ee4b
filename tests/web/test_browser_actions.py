"""What operators do on pages, in a browser, with scripts and without: runs, schedules and lanes."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.support.api_server import new_key
from tests.web.conftest import AXE, PATIENCE, PHONE, aside

pytestmark = pytest.mark.long

TRAIL = "SELECT string_agg(action, ' ' ORDER BY id) FROM audit_trail WHERE subject = %s"
SCREENS = {"laptop": {"width": 1440, "height": 900}, "phone": PHONE}


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
    visitor = visit(reader.client, java_script_enabled=request.param)
    visitor.admit(key)
    visitor.scripts, visitor.client = request.param, reader.client.with_key(key)
    return visitor


def press(page, name: str) -> None:
    """A button on a page, which leads to a form, or the button of a form."""
    page.get_by_role("button", name=name, exact=True).click()


def test_a_schedule_is_made_run_disabled_enabled_changed_and_deleted(desk, fill):
    page, name = desk.page, f"by pages {desk.scripts}"
    desk.go("/ui/schedules")
    press(page, "New schedule")
    page.get_by_label("Name").fill(name)
    page.get_by_label("Flow").fill("test")
    page.get_by_label("Cron").fill("61 * * * *")
    desk.expected = ("422",)
    press(page, "New schedule")
    expect(page.get_by_role("alert")).to_contain_text("out of range")
    page.get_by_label("Cron").fill("30 2 * * *")
    press(page, "New schedule")
    expect(page.locator("#done")).to_contain_text("The schedule was created.")
    made = fill("SELECT id FROM schedules WHERE name = %s", name)
    page.get_by_role("link", name=name).click()

    press(page, "Run now")
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Run now: schedule {name}")
    press(page, "Run now")
    expect(page.locator("#done")).to_contain_text("A run was started.")
    page.get_by_role("link", name="Show the run").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text(name)
    expect(page).to_have_title(f"0 % · {name}")

    desk.go(f"/ui/schedules/{made}")
    press(page, "Disable")
    press(page, "Disable")
    expect(page.locator("#done")).to_contain_text("The schedule is disabled.")
    expect(page.locator(".verdict .badge")).to_have_text("disabled")
    press(page, "Enable")
    press(page, "Enable")
    expect(page.locator(".verdict .badge")).to_have_text("enabled")
    press(page, "Edit")
    expect(page.get_by_label("Cron")).to_have_value("30 2 * * *")
    page.get_by_label("Cron").fill("15 4 * * 1-5")
    page.get_by_label("Timezone").fill("Europe/Paris")
    press(page, "Edit")
    expect(page.locator("#done")).to_contain_text("The schedule was saved.")
    expect(page.locator(".card")).to_contain_text("15 4 * * 1-5")
    press(page, "Delete")
    expect(page.get_by_text(f"Schedule {made} is deleted, for good.")).to_be_visible()
    press(page, "Delete")
    expect(page.get_by_role("heading", level=1)).to_have_text("Schedules")
    expect(page.get_by_role("link", name=name)).to_have_count(0)
    done = "schedule.create schedule.run schedule.disable schedule.enable schedule.update schedule.delete"
    assert fill(TRAIL, f"schedule:{made}") == done


def test_an_automation_schedule_is_made_and_changed(desk, fill):
    page, name = desk.page, f"automation {desk.scripts}"
    desk.go("/ui/schedules")
    press(page, "New automation schedule")
    page.get_by_label("Name", exact=False).first.fill(name)
    page.get_by_label("Schedule type").select_option("DAILY")
    page.get_by_label("Time of day").fill("06:30")
    page.get_by_label("Date range").select_option("yesterday")
    page.get_by_label("Groupes").fill("Paris\nLyon, Nice")
    press(page, "New automation schedule")
    expect(page.locator("#done")).to_contain_text("The schedule was created.")
    made = fill("SELECT id FROM schedules WHERE name = %s", name)
    chosen = (
        "SELECT fiche_selection_groupes::text || fiche_selection_only_unaudited FROM automation_schedules WHERE id = %s"
    )
    assert fill(chosen, made) == "{Paris,Lyon,Nice}false"
    page.get_by_role("link", name=name).click()
    press(page, "Edit")
    expect(page.get_by_label("Groupes")).to_have_value("Paris\nLyon\nNice")
    expect(page.get_by_label("Date range")).to_have_value("yesterday")
    page.get_by_label("Groupes").fill("Lyon")
    page.get_by_label("Only unaudited").check()
    press(page, "Edit")
    expect(page.locator("#done")).to_contain_text("The schedule was saved.")
    assert fill(chosen, made) == "{Lyon}true"
    assert fill("SELECT fiche_selection_date_range FROM automation_schedules WHERE id = %s", made) == "yesterday"


def test_a_run_is_started_again_and_ended_with_a_preview_and_a_reason(desk, fill, ended_run):
    page = desk.page
    before = ended_run(("a", "successful", None, None))
    fill('UPDATE runs SET input = \'{"targets": ["x"], "payload": null}\' WHERE id = %s', before)
    desk.go(f"/ui/runs/{before}")
    press(page, "Start again")
    expect(page.get_by_label("Flow")).to_have_value("test")
    press(page, "Start again")
    page.get_by_role("link", name="Show the run").click()
    run_id = int(page.url.rpartition("/")[2])
    press(page, "End run")
    expect(page.get_by_role("region", name="Preview")).to_contain_text("Children that end")
    expect(page.get_by_text("nothing more is started")).to_be_visible()
    page.get_by_label("Reason").fill("not needed <b>now</b>")
    press(page, "End run")
    expect(page.locator("#done")).to_contain_text(f"Run {run_id} was ended.")
    expect(page.locator(".verdict")).to_contain_text("cancelled")
    expect(page.locator(".verdict")).to_contain_text("not needed <b>now</b>")
    assert fill(TRAIL, f"run:{run_id}") == "run.start run.end"
    reason = "SELECT reason FROM audit_trail WHERE subject = %s AND action = 'run.end'"
    assert fill(reason, f"run:{run_id}") == "not needed <b>now</b>"


def test_failed_targets_are_redriven_with_a_preview(desk, fill, ended_run):
    page, name = desk.page, f"redriven {desk.scripts}"
    given = {"name": name, "schedule_type": "MANUAL", "fiche_selection": {"mode": "manual", "fiche_ids": ["1", "2"]}}
    client = desk.client
    schedule = int(client.post("/api/automation/schedules", given).json["id"])
    bad = [("1", "failed", "NO_URL", "no URL"), ("2", "failed", "TIMEOUT", "too slow"), ("3", "successful", None, None)]
    run_id = ended_run(*bad, flow="automation", status="partial", state="partial", schedule=schedule)
    fill(
        "INSERT INTO automation_run_facts (run_id, schedule_id, config_snapshot) VALUES (%s, %s, '{}')",
        run_id,
        schedule,
    )
    desk.go(f"/ui/runs/{run_id}")
    expect(page).to_have_title(f"partial · 2 failed · {name}")
    reasons = page.get_by_role("list", name="Failures by reason")
    expect(reasons).to_contain_text("A redrive fails again until the record is corrected in the CRM.")
    reasons.get_by_role("listitem").filter(has_text="TIMEOUT").get_by_role("button", name="Redrive run").click()
    preview = page.get_by_role("region", name="Preview")
    expect(preview).to_contain_text(re.compile(r"Count\s*1"))
    page.get_by_label("Error code").fill("")
    press(page, "Preview again")
    expect(preview).to_contain_text(re.compile(r"Count\s*2"))
    page.get_by_label("Error code").fill("TIMEOUT")
    press(page, "Redrive run")
    expect(page.locator("#done")).to_contain_text("The targets are redriven.")
    redrive = fill("SELECT id FROM runs WHERE redrive_of = %s", run_id)
    assert '"fiche_ids": ["2"]' in fill("SELECT input::text FROM runs WHERE id = %s", redrive)
    assert fill(TRAIL, f"run:{run_id}") == "run.redrive"


def test_a_lane_is_paused_capped_and_resumed(desk, fill):
    page, lane = desk.page, f"vendor/{desk.scripts} x"
    fill("INSERT INTO lanes (name, max_in_flight, declared_max_in_flight) VALUES (%s, 9, 9)", lane)
    desk.go("/ui/lanes")
    row = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name=lane))
    row.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Pause lane {lane}")
    page.get_by_label("Reason").fill("invoice 4711")
    press(page, "Pause")
    expect(page.locator("#done")).to_contain_text(f"Lane {lane} is paused.")
    expect(row).to_contain_text("invoice 4711")
    row.get_by_role("button", name="Change caps").click()
    expect(page.get_by_label("Max in flight")).to_have_value("9")
    page.get_by_label("Max in flight").fill("3")
    press(page, "Change caps")
    expect(row).to_contain_text("3 in flight")
    row.get_by_role("button", name="Resume").click()
    page.get_by_label("Reason").fill("paid")
    press(page, "Resume")
    expect(row.get_by_text("open", exact=True)).to_be_visible()
    assert fill(TRAIL, f"lane:{lane}") == "lane.pause lane.cap lane.resume"


def test_a_schedule_is_run_from_the_list_of_runs(desk, fill):
    page, name = desk.page, f"from the list {desk.scripts}"
    assert desk.client.post("/api/schedules", {"flow": "test", "name": name}).status == 201
    desk.go("/ui/runs")
    page.get_by_label("Run a schedule").select_option(name)
    press(page, "Run now")
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Run now: schedule {name}")
    press(page, "Run now")
    expect(page).to_have_url(f"{desk.base}/ui/runs")
    expect(page.locator("#done")).to_contain_text("A run was started.")


@pytest.mark.parametrize("screen", SCREENS)
def test_the_first_screen_of_an_ended_run_has_the_first_failures_and_what_to_do(reader, visit, key, ended_run, screen):
    good = [(f"1{n:03d}", "successful", None, None) for n in range(193)]
    bad = [(f"2{n:03d}", "failed", "NO_URL", "1 of 3 recordings has no URL in the CRM") for n in range(7)]
    run_id = ended_run(*good, *bad, flow="automation", status="partial", state="partial")
    for _ in range(10):
        ended_run(parent=run_id)
    page = visit(reader.client, viewport=SCREENS[screen]).enter(key, f"/ui/runs/{run_id}")
    for one in (
        page.get_by_text("Ended partial: 7 failed of 200."),
        page.locator(".card .bar"),
        page.get_by_role("link", name="2000").first,
        page.get_by_role("link", name="all 7"),
        page.get_by_text("A redrive fails again until the record is corrected in the CRM."),
        page.get_by_role("button", name="Redrive run").first,
    ):
        expect(one).to_be_in_viewport(ratio=1)
    headings = [one.split("\n")[0] for one in page.get_by_role("heading", level=2).all_inner_texts()]
    assert [one.split(" CSV")[0] for one in headings] == [
        "What failed", "Outcomes", "Stages", "Log newest first", "Child runs",
    ]  # fmt: skip


PAGES = {
    "runs": ["/ui/runs", "/ui/runs/{run}", "/ui/runs/{run}/targets/777", "/ui/targets?q=777"],
    "records": ["/ui/lanes", "/ui/audits", "/ui/audits/{audit}", "/ui/schedules", "/ui/schedules/{schedule}"],
    "forms": ["/ui/do/create_config", "/ui/do/create_automation_schedule", "/ui/do/pause_lane_now/slow {which}"],
    "forms with a record": ["/ui/do/change_schedule/{schedule}", "/ui/do/redrive_run/{run}"],
}
FULL = "axe.run({rules: {'target-size': {enabled: true}}})"
AGAIN = "axe.run({runOnly: ['color-contrast', 'target-size']})"


@pytest.mark.parametrize("which", PAGES)
def test_every_new_page_is_accessible_and_fits_its_screen(reader, visit, key, fill, ended_run, audited, which):
    outcome = ("777", "failed", "NO_URL", "no " + "x" * 300)
    run_id = ended_run(outcome, flow="automation", status="failed", state="failed")
    known = {"run": run_id, "audit": audited(f"777 {which}", run_id), "which": which}
    fill("INSERT INTO lanes (name, paused_at, paused_reason) VALUES (%s, ecluse_now(), 'x')", f"slow {which}")
    made = reader.client.with_key(key).post("/api/schedules", {"flow": "test", "name": f"axe {which}"})
    known["schedule"] = made.json["id"]
    visitor = visit(reader.client, reduced_motion="reduce")
    visitor.expected = ("422",)
    page = visitor.admit(key)
    found = []
    for path in PAGES[which]:
        page.set_viewport_size(SCREENS["laptop"])
        page.emulate_media(color_scheme="light")
        visitor.go(path.format(**known))
        if path == "/ui/do/create_config":  # as it is refused
            page.get_by_label("Name").first.fill("x")
            press(page, "New config")
            expect(page.get_by_role("alert")).to_be_visible()
        page.evaluate(AXE.read_text())
        for size, scheme, rules in ((SCREENS["laptop"], "light", FULL), (PHONE, "dark", AGAIN)):
            page.set_viewport_size(size)
            page.emulate_media(color_scheme=scheme)
            result = page.evaluate(rules)
            assert result["passes"]
            found += [
                f"{path} {scheme} {one['id']} {node['html']}" for one in result["violations"] for node in one["nodes"]
            ]
            wide, room = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
            found += [f"{path} has to be moved sideways on {size}: {wide} > {room}"] if wide > room else []
    assert not found, "\n".join(found)
