"""The streams that keep pages true: rendered again when something happened, not too often, and never for nobody."""

from __future__ import annotations

import asyncio
import time

import pytest

from ecluse.realtime.hub import RECONNECT, Listener, Message
from ecluse.web import live
from tests.support.api_server import FLOW, new_key, serving
from tests.support.pages import Reader
from tests.support.realtime_events import on_its_loop, publish, tell
from tests.support.waits import wait_for


def start(reader, pages_dsn, *targets):
    client = reader.client.with_key(new_key(pages_dsn))
    return client.post("/api/runs", {"flow": "test", "input": {"targets": list(targets)}}).json["run_id"]


def test_a_page_is_sent_again_when_something_of_its_run_happened(reader, pages_dsn, fill, follow, paced):
    paced(reader.client, tick=1000, least=0)
    run_id = start(reader, pages_dsn)
    page = follow(reader, f"/ui/runs/{run_id}/live")
    assert (page.status, page.headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8")
    assert page.headers["Content-Security-Policy"]
    name, html = page.next()
    assert name == ""
    assert "queued" in html
    fill("UPDATE runs SET phase = 'first phase' WHERE id = %s", run_id)
    tell(reader.client, "test.progress", {"run_id": run_id})
    while "first phase" not in html:
        _, html = page.next()
    fill("UPDATE runs SET phase = 'second phase' WHERE id = %s", run_id)
    publish(pages_dsn, "test/selected", {"run_id": run_id})
    while "second phase" not in html:
        _, html = page.next()


def test_the_last_word_of_a_stream_is_how_the_run_ended(reader, pages_dsn, fill, follow, paced):
    paced(reader.client, tick=0.1)
    run_id = start(reader, pages_dsn)
    page = follow(reader, f"/ui/runs/{run_id}/live")
    assert "queued" in page.next()[1]
    fill(
        "UPDATE runs SET status = 'failed', state = 'failed', selected = 0, successful = 0, failed = 0, ignored = 0,"
        " end_cause = 'operator', reason = 'wrong catalogue', ended_at = ecluse_now() WHERE id = %s",
        run_id,
    )
    while (told := page.next())[0] != "end":
        html = told[1]
    assert "wrong catalogue" in html
    assert "cancelled by an operator" in html
    assert page.next() is None
    again = follow(reader, f"/ui/runs/{run_id}/live")
    assert "wrong catalogue" in again.next()[1]
    assert again.next() == ("end", "")


def test_the_list_is_sent_again_when_a_run_begins_and_asks_the_same_question(reader, pages_dsn, follow, paced):
    paced(reader.client, least=0)
    page, other = follow(reader, "/ui/runs/live"), follow(reader, "/ui/runs/live?flow=other")
    page.next()
    assert "No matching runs" in other.next()[1]
    run_id = start(reader, pages_dsn)
    publish(pages_dsn, "test/started", {"run_id": run_id})
    html = ""
    while f"/ui/runs/{run_id}" not in html:
        _, html = page.next()


def test_what_breaks_lines_does_not_break_the_stream(reader, pages_dsn, fill, follow):
    run_id = start(reader, pages_dsn)
    fill("UPDATE runs SET phase = %s WHERE id = %s", "one\r\ndata: two\n\nevent: end\rthree\u2028four", run_id)
    name, html = follow(reader, f"/ui/runs/{run_id}/live").next()
    assert name == ""
    assert "event: end" in html
    assert "</section>" in html.partition("four")[2]


def test_nothing_is_asked_for_once_nobody_looks(reader, pages_dsn, follow):
    hub = reader.client.app.state.realtime.hub
    page = follow(reader, f"/ui/runs/{start(reader, pages_dsn)}/live")
    page.next()
    assert on_its_loop(reader.client, lambda: len(hub.listeners)) >= 1
    page.close()
    wait_for(lambda: not on_its_loop(reader.client, lambda: hub.listeners))


def test_streams_come_to_a_proper_end_when_the_server_stops(dsn, follow):
    key = new_key(dsn)
    with serving(dsn, FLOW) as client:
        mine = Reader(client, key)
        run_id = client.with_key(new_key(dsn)).post("/api/runs", {"flow": "test"}).json["run_id"]
        paths = ["/ui/runs/live", f"/ui/runs/{run_id}/live", "/ui/schedules/live"]
        opened = [follow(mine, path) for path in paths]
        assert all(page.next() for page in opened)
    for page in opened:
        while page.next() is not None:
            pass


def test_a_key_has_so_many_streams_and_gets_a_place_back_for_each_that_ends(dsn, follow):
    with serving(dsn, FLOW, ECLUSE_LIMIT_KEY_PAGE_STREAMS=2, ECLUSE_LIMIT_TENANT_PAGE_STREAMS=3) as client:
        mine, other = Reader(client, new_key(dsn)), Reader(client, new_key(dsn))
        first, second = follow(mine, "/ui/runs/live"), follow(mine, "/ui/schedules/live")
        assert first.next()
        assert second.next()
        refused = mine.get("/ui/runs/live", Sec_Fetch_Mode="cors")
        assert refused.status == 429
        assert b"key_page_streams" in refused.body
        assert refused.headers["Retry-After"] == "10"
        assert follow(other, "/ui/runs/live").next()
        full = other.get("/ui/runs/live", Sec_Fetch_Mode="cors")
        assert (full.status, b"tenant_page_streams" in full.body) == (429, True)
        first.close()
        wait_for(lambda: follow(mine, "/ui/runs/live").status == 200)


async def waits(listener, since, most=1000.0, least=1.0):
    """Does it wait on? A slow machine can only make it wait longer."""
    try:
        await asyncio.wait_for(live._until_it_pays(listener, lambda m: m.event == "ours", since, least, most), 0.1)
    except TimeoutError:
        return True
    return False


@pytest.mark.parametrize(
    ("event", "seconds_ago", "most", "expected"),
    [
        ("ours", 5, 1000, False),  # something happened, and it was rendered a while ago
        ("ours", 0, 1000, True),  # a moment ago: at most once in so many seconds
        ("theirs", 5, 1000, True),  # somebody else's
        (None, 5, 1000, True),
        (None, 5, 4, False),  # it is time anyway
    ],
)
async def test_it_is_rendered_again_when_it_pays(event, seconds_ago, most, expected):
    listener = Listener("default", "sse")
    if event:
        listener.offer(Message("default", event, [], "{}"), ["*"])
    assert await waits(listener, time.monotonic() - seconds_ago, most, least=3) is expected


async def test_who_is_sent_away_does_not_wait():
    listener = Listener("default", "sse")
    listener.disconnect(*RECONNECT)
    assert not await waits(listener, time.monotonic())


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ('{"run_id": "7"}', "7"),
        ('{"run_id": 7}', "7"),
        ('{"run_id": null}', None),
        ("{}", None),
        ('"7"', None),
        ("x", None),
    ],
)
def test_a_message_is_about_a_run_if_it_says_so_whatever_else_it_may_be(data, said):
    assert live.said(Message("default", "any", [], data), "run_id") == said
