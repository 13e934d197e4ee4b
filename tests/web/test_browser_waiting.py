"""The page of a run that stands still, in a browser: what is wrong is on the first screen, and does not look well."""

from __future__ import annotations

import re

import psycopg
import pytest
from playwright.sync_api import expect

from tests.support.api_server import new_key
from tests.web.conftest import AXE, PATIENCE, PHONE, aside

SCREENS = {"laptop": {"width": 1440, "height": 900}, "phone": PHONE}
WARNING = (
    "926 recordings have no transcript yet, which takes 47 min at 20 a minute; the run waits 15 min"
    " (AUTOMATION_TRANSCRIPTION_MAX_WAIT_MS): about 300 of them can be there in time, and the fiches of the others"
    " fail."
)
# An automation run that waits for a transcription, of which 911 recordings wait in a paused lane.
HELD = """
WITH at AS (SELECT ecluse_now() - interval '3 minutes' AS since),
lane AS (INSERT INTO lanes (name, paused_at, paused_by, paused_reason)
         SELECT 'elevenlabs', since, 'cli:ann', 'invoice 4711' FROM at RETURNING id),
made AS (INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, phase, selected, created_at,
                           started_at)
         SELECT 'default', flow, gen_random_uuid(), flow = 'automation', 'running', 'running', 'transcribing', 204,
                since, since FROM at, unnest(ARRAY['automation', 'transcription']) AS flow RETURNING id, flow),
run AS (SELECT id FROM made WHERE flow = 'automation'), child AS (SELECT id FROM made WHERE flow = 'transcription'),
fact AS (INSERT INTO automation_run_facts (run_id, schedule_id, config_snapshot)
         SELECT id, 1, jsonb_build_object('budget_warning', %(warning)s::text) FROM run),
tree AS (INSERT INTO run_waiters SELECT child.id, run.id, '' FROM child, run),
stage AS (INSERT INTO stages (run_id, stage, budget, started_at, fanned_out_at, deadline_at, progress_at, units,
                              progress)
          SELECT run.id, 'transcribe', 1, since, since, since + interval '15 minutes', since, 926, 15 FROM run, at),
work AS (INSERT INTO items (tenant_id, run_id, flow, stage, key, target, lane_id, due_at)
         SELECT 'default', child.id, 'transcription', 'recordings', n::text, n::text, lane.id, since
         FROM child, lane, at, generate_series(1, 911) n),
line AS (INSERT INTO run_log (run_id, at, level, message) SELECT run.id, since, 'info', 'Transcribing' FROM run, at),
linked AS (INSERT INTO outcomes (run_id, target) SELECT run.id, n::text FROM run, generate_series(1, 204) n)
SELECT id FROM run
"""


@pytest.fixture(scope="module", autouse=True)
def _patience():
    expect.set_options(timeout=PATIENCE * 1000)
    yield
    expect.set_options(timeout=5_000)


@pytest.fixture(scope="module")
def held(pages_dsn):
    with psycopg.connect(pages_dsn) as connection:
        connection.execute("ALTER TABLE automation_run_facts DISABLE TRIGGER ALL")  # there is no schedule
        (run_id,) = connection.execute(HELD, {"warning": WARNING}).fetchone()
        child = connection.execute("SELECT run_id FROM run_waiters WHERE waiter_run_id = %s", (run_id,)).fetchone()[0]
        connection.execute("UPDATE runs SET parent_run_id = %s WHERE id = %s", (run_id, child))
    return run_id


@pytest.fixture
def shown(reader, visit, held):
    """The run's page on this screen."""

    def show(screen: str, scheme: str = "light"):
        visitor = visit(reader.client, viewport=SCREENS[screen], color_scheme=scheme, reduced_motion="reduce")
        return visitor.enter(reader.key, f"/ui/runs/{held}")

    return show


@pytest.mark.parametrize("screen", SCREENS)
def test_what_is_wrong_stands_on_the_first_screen(shown, screen):
    page = shown(screen)
    first = [
        page.locator(".verdict"),
        page.get_by_text(re.compile(r"No progress for \d+ min")),
        page.get_by_text("911 waiting: lane elevenlabs was paused by an operator: invoice 4711"),
        page.get_by_text("about 300 of them can be there in time"),
        page.get_by_text("Last progress"),
        page.get_by_text("Time limit of transcribe"),
        page.get_by_text(re.compile(r"in \d+ min \d\d s")),
    ]
    for one in first:
        expect(one).to_be_in_viewport(ratio=1)
    assert page.evaluate("window.scrollY") == 0
    headings = page.get_by_role("heading", level=2).all_inner_texts()
    assert [text.split("\n")[0].removesuffix(" CSV") for text in headings] == [
        "Why it waits", "Outcomes", "Stages", "Log newest first", "Child runs",
    ]  # fmt: skip


def test_the_note_on_a_time_limit_is_a_line_of_its_own(shown):
    note = shown("laptop").locator("dd small", has_text="items still waiting at that time will fail")
    assert note.inner_text() == "items still waiting at that time will fail"


@pytest.mark.parametrize(("screen", "scheme"), [("laptop", "light"), ("phone", "dark")])
def test_a_run_that_stands_still_does_not_look_well_and_can_be_read_by_all(reader, shown, screen, scheme):
    page = shown(screen, scheme)
    colours = "[...document.querySelectorAll('.card .badge, .card .bar rect')].map((e) => getComputedStyle(e).fill)"
    expect(page.locator(".card.stuck")).to_be_visible()
    fills = page.evaluate(colours)
    assert len(fills) == 2, "a badge, and a bar of which something is done"
    assert not {"rgb(47, 166, 106)", "rgb(53, 168, 112)"} & set(fills), "no green"
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run()")
    assert found["passes"]
    assert not [f"{one['id']} {node['html']}" for one in found["violations"] for node in one["nodes"]]
    page.goto(page.url.partition("/ui/")[0] + "/ui/runs")
    row = page.locator("tr.stuck")
    expect(row).to_contain_text(re.compile(r"lane elevenlabs is paused: invoice 4711; no progress for \d+ min"))


def test_times_are_counted_on_by_the_page_and_only_what_has_changed_is_swapped(reader, shown, held, pages_dsn, paced):
    paced(reader.client, tick=0.2)
    page = shown("laptop")
    page.add_init_script(
        "window.swaps = []; document.addEventListener('htmx:before:swap',"
        " (e) => window.swaps.push(...e.detail.tasks.map((t) => t.target.id)))"
    )
    page.reload()
    expect(page.get_by_role("status")).to_have_text("Live")
    page.get_by_text("Input and keys").click()
    page.wait_for_function("window.swaps.length")  # a stream begins with every region
    page.evaluate("window.swaps = []")
    duration = page.locator(".facts .ticks").first
    before = duration.inner_text()
    expect(duration).not_to_have_text(before)
    assert page.evaluate("window.swaps") == [], "nothing is sent for a second that passes"

    def pause_for(reason: str) -> None:
        with psycopg.connect(pages_dsn, autocommit=True) as connection:
            connection.execute("UPDATE lanes SET paused_reason = %s WHERE name = 'elevenlabs'", (reason,))

    aside(pause_for, "another invoice")
    expect(page.locator("#part-waiting")).to_contain_text("another invoice")
    expect(page.locator("#part-header")).to_contain_text("another invoice")
    assert set(page.evaluate("window.swaps")) == {"part-header", "part-waiting", "part-children"}
    assert duration.inner_text(), "what a stream leaves open is counted on at once"
    expect(page.get_by_text("Event key")).to_be_visible()
    aside(pause_for, "invoice 4711")


def test_a_clock_that_stands_still_is_not_counted_on(reader, held, fill):
    fill("UPDATE lanes SET clock_stopped_at = paused_at WHERE name = 'elevenlabs'")
    assert "Time limit of transcribe clock stopped" in reader.shown(f"/ui/runs/{held}")
    fill("UPDATE lanes SET clock_stopped_at = NULL WHERE name = 'elevenlabs'")
    assert "Time limit of transcribe in " in reader.shown(f"/ui/runs/{held}")


def test_without_scripts_the_page_says_the_same(reader, visit, held, pages_dsn):
    page = visit(reader.client, java_script_enabled=False).enter(aside(new_key, pages_dsn), f"/ui/runs/{held}")
    expect(page.get_by_text(re.compile(r"No progress for \d+ min \d\d s"))).to_be_visible()
    expect(page.locator("#part-waiting")).to_contain_text("was paused by an operator")
