"""A real server, a browser's cookie by hand, and a real browser: Debian's Chromium, driven by playwright."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Response, sync_playwright
from psycopg.types.json import Jsonb

from ecluse.web.authentication import COOKIE
from ecluse.web.live import Pace
from tests.support.api_server import FLOW, Client, add_tenant, new_key, serving
from tests.support.pages import LivePage, Reader
from tests.support.waits import PATIENCE

AXE = Path(__file__).parent / "vendored" / "axe-core-4.14.0" / "axe.min.js"
LAPTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


def aside(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """In a thread of its own: while a browser is driven, this one has a running loop, and can have no other."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call, *arguments, **options).result()


def unreadable(page: Page) -> list[str]:
    """What is wrong with a page on a laptop and, in the dark, on a phone; only colours and sizes are judged twice."""
    page.evaluate(AXE.read_text())
    found = []
    again = "{runOnly: ['color-contrast', 'target-size']}"
    for screen, scheme, rules in ((LAPTOP, "light", "{}"), (PHONE, "dark", again)):
        page.set_viewport_size(screen)
        page.emulate_media(color_scheme=scheme)
        violations = page.evaluate(f"axe.run({rules})")["violations"]
        found += [f"{page.url} {scheme} {one['id']} {node['html']}" for one in violations for node in one["nodes"]]
        wide, room = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        found += [] if wide <= room else [f"{page.url} has to be moved sideways on {screen}"]
    return found


@pytest.fixture
def follow() -> Iterator[Callable[[Reader, str], LivePage]]:
    opened: list[LivePage] = []

    def start(reader: Reader, path: str) -> LivePage:
        opened.append(LivePage(reader, path))
        return opened[-1]

    yield start
    for page in opened:
        page.close()


@pytest.fixture
def paced() -> Iterator[Callable[..., None]]:
    """Pages of this server at this pace, until the end of the test."""
    changed: list[Client] = []

    def put(client: Client, **seconds: float) -> None:
        changed.append(client)
        client.app.state.page_pace = Pace(**seconds)

    yield put
    for client in changed:
        client.app.state.page_pace = Pace()


@pytest.fixture(scope="module")
def pages_dsn(databases) -> Iterator[str]:
    with databases.one() as dsn:
        add_tenant(dsn, "rival")
        yield dsn


@pytest.fixture(scope="module")
def reader(pages_dsn) -> Iterator[Reader]:
    """One server for a whole file, where nobody works, with a viewer's key of tenant `default`."""
    key = new_key(pages_dsn, "viewer")
    with serving(pages_dsn, FLOW) as client:
        yield Reader(client, key)


@pytest.fixture
def fill(pages_dsn) -> Iterator[Callable[..., Any]]:
    """Rows as the engine would have left them; gives back the first column of the first row."""
    with psycopg.connect(pages_dsn, autocommit=True) as connection:

        def execute(sql: str, *parameters: object) -> Any:
            cursor = connection.execute(sql, parameters or None)
            return (cursor.fetchone() or [None])[0] if cursor.description else None

        yield execute


@pytest.fixture
def of(reader, pages_dsn, fill) -> Callable[[str], Reader]:
    """A reader of a tenant of its own, which nothing else has written to."""

    def make(tenant: str) -> Reader:
        fill("INSERT INTO tenants (id, name, created_at) VALUES (%s, %s, ecluse_now())", tenant, tenant)
        return reader.with_key(new_key(pages_dsn, "viewer", tenant))

    return make


BEGUN = """
WITH run AS (
    INSERT INTO runs (tenant_id, flow, event_key, parent_run_id, redrive_of, schedule_id, orchestrated, status, state,
        created_at, started_at)
    VALUES (%(tenant)s, %(flow)s, gen_random_uuid(), %(parent)s, %(redrive_of)s, %(schedule)s, true, 'running',
        'running', '2026-03-02 10:00:00Z', '2026-03-02 10:00:00Z') RETURNING id),
settled AS (
    INSERT INTO outcomes (run_id, target, outcome, error_code, reason)
    SELECT run.id, t, o, c, r FROM run, unnest(%(targets)s::text[], %(outcomes)s::text[], %(codes)s::text[],
        %(reasons)s::text[]) AS given(t, o, c, r))
SELECT id FROM run
"""
ENDED = """
UPDATE runs SET status = %(status)s, state = %(state)s, error_code = %(error_code)s, error_message = %(error_message)s,
    selected = o.n, successful = o.successful, failed = o.failed, ignored = o.ignored, end_cause = 'normal',
    ended_at = '2026-03-02 10:03:07Z'
FROM (SELECT count(*) AS n, count(*) FILTER (WHERE outcome = 'successful') AS successful,
        count(*) FILTER (WHERE outcome = 'failed') AS failed, count(*) FILTER (WHERE outcome = 'ignored') AS ignored
    FROM outcomes WHERE run_id = %(id)s) o
WHERE id = %(id)s
"""


@pytest.fixture
def ended_run(pages_dsn) -> Callable[..., int]:
    """A run that is over; `outcomes` are rows of target, outcome, code and reason."""

    def make(*outcomes: tuple[str, str, str | None, str | None], **given: Any) -> int:
        columns = [list(column) for column in zip(*outcomes, strict=True)] or [[], [], [], []]
        values = {
            **dict.fromkeys(("parent", "redrive_of", "schedule", "error_code", "error_message")),
            "tenant": "default",
            "flow": "test",
            "status": "completed",
            "state": "succeeded",
            **dict(zip(("targets", "outcomes", "codes", "reasons"), columns, strict=True)),
            **given,
        }
        with psycopg.connect(pages_dsn) as connection:
            (run_id,) = connection.execute(BEGUN, values).fetchone() or (0,)
            connection.execute(ENDED, {"id": run_id, **values})
        return int(run_id)

    return make


AUDITED = """
WITH at AS (SELECT '2026-03-02 10:01:00Z'::timestamptz AS at),
fiche AS (INSERT INTO fiche_cache (tenant_id, fiche_id, created_at, updated_at)
          SELECT 'default', %(fiche)s, at, at FROM at RETURNING id),
calls AS (INSERT INTO recordings (fiche_cache_id, call_id, recording_url, start_time, duration_s, has_transcription,
              transcription_text, transcribed_at, created_at, updated_at)
          SELECT id, %(fiche)s || '-1', 'https://calls.test/a.mp3', at, 61, true, 'Yes, I agree.', at, at, at
          FROM fiche, at),
config AS (INSERT INTO audit_configs (tenant_id, name, steps, created_at, updated_at)
           SELECT 'default', 'Compliance of ' || %(fiche)s, '[]', at, at FROM at RETURNING id),
version AS (INSERT INTO audit_config_versions (audit_config_id, version, snapshot, created_at)
            SELECT id, 1, jsonb_build_object('name', 'Compliance'), at FROM config, at)
INSERT INTO audits (tenant_id, run_id, fiche_cache_id, fiche_id, audit_config_id, config_version, automation_run_id,
    trigger_source, status, score, result, created_at, finished_at)
SELECT 'default', %(run)s, fiche.id, %(fiche)s, config.id, 1, %(run)s, 'automation', 'completed', 90, %(result)s, at, at
FROM fiche, config, at RETURNING id
"""
JUDGED = {
    "name": "Consent",
    "score": 4.5,
    "max": 5,
    "weight": 2,
    "comment": "Clear.",
    "evidence": [
        {"quote": "I agree", "call_id": "c-1", "position": 5, "verified": True},
        {"quote": "never said", "call_id": None, "position": None, "verified": False},
    ],
}


@pytest.fixture
def audited(pages_dsn) -> Callable[..., int]:
    """A fiche with a transcript and an audit, made by this run; gives back the id of the audit."""

    def make(fiche: str, run_id: int = 1) -> int:
        given = {"fiche": fiche, "run": run_id, "result": Jsonb({"steps": [JUDGED]})}
        with psycopg.connect(pages_dsn) as connection:
            (audit_id,) = connection.execute(AUDITED, given).fetchone() or (0,)
        return int(audit_id)

    return make


# For a file, not for the session: other tests want the thread's loop for themselves.
@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    # The shell is the same browser without a window's interface, for two thirds of the CPU time.
    program = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    assert program, "the pages are tested in Debian's Chromium, which is not installed: run `make browser` as root"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visitor:
    """A browser of its own, and everything that its pages complained about."""

    def __init__(self, context: BrowserContext, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}"
        self.complaints: list[str] = []
        self.expected: tuple[str, ...] = ()  # what the browser may complain about
        self._context = context
        self.page = page = context.new_page()
        page.set_default_timeout(PATIENCE * 1000)
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not any(one in message.text for one in self.expected):
            self.complaints.append(message.text)

    def go(self, path: str) -> Response | None:
        return self.page.goto(self.base + path)

    def admit(self, key: str) -> Page:
        """As if logged in before: with the cookie that the form sets."""
        self._context.add_cookies(
            [
                {
                    "name": COOKIE,
                    "value": key,
                    "domain": "127.0.0.1",
                    "path": "/ui",
                    "httpOnly": True,
                    "sameSite": "Strict",
                }
            ]
        )
        return self.page

    def enter(self, key: str, path: str = "/ui/runs") -> Page:
        self.admit(key)
        self.go(path)
        self.page.get_by_role("button", name="Log out").wait_for()
        return self.page

    def log_in(self, key: str, path: str = "/ui/runs") -> Page:
        """By the form."""
        self.go(path)
        self.page.get_by_label("API key").fill(key)
        self.page.get_by_role("button", name="Log in").click()
        self.page.get_by_role("button", name="Log out").wait_for()
        return self.page


@pytest.fixture
def visit(chromium) -> Iterator[Callable[..., Visitor]]:
    """A new browser profile at this server; at the end nothing may have been complained about."""
    contexts: list[BrowserContext] = []
    visitors: list[Visitor] = []

    def start(client: Client, **options: Any) -> Visitor:
        contexts.append(chromium.new_context(**({"viewport": LAPTOP} | options)))
        visitors.append(Visitor(contexts[-1], client.port))
        return visitors[-1]

    yield start
    for context in contexts:
        context.close()
    assert [visitor.complaints for visitor in visitors] == [[] for _ in visitors]
