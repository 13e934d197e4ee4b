"""Mail through the engine, to a mail server on a socket: tried again while it is not taken, never sent twice."""

from __future__ import annotations

import asyncio
import re
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from html import unescape

import pytest
from starlette.routing import Match

from ecluse import web
from ecluse.base.errors import PermanentError
from ecluse.bootstrap import notify_setup
from ecluse.engine import Done, Event, Item, Result, WorkContext, pause_lane, resume_lane, write_events
from ecluse.notify.dispatch import Recipient, notify
from ecluse.notify.mail_text import compose
from ecluse.notify.work import Delivery
from ecluse.settings import Settings
from tests.support.engine_flows import TAKE_OVER, flow, run_to_end, stage, started, until
from tests.support.notify_world import SENDER, confirm, mail_server, overloaded_mail_server, smtp_of
from tests.support.runs import end_run

TO = "ops@example.com"
LINK = re.compile(r"https?://\S+")


async def one_is_refused(_: WorkContext, item: Item) -> Result:
    if item.key == "a":
        raise PermanentError("no", code="NO_SUCH_ARTICLE")
    return Done()


@pytest.mark.req("AUT-127", "G-43")
async def test_a_mail_says_what_became_of_the_run_and_why(start_world):
    async with mail_server() as mailbox:
        world = await start_world(
            f := flow(stage(one_is_refused)), smtp=smtp_of(mailbox), public_url="https://ecluse.example.com/"
        )
        await world.mail_endpoint(TO, "boss@example.com", events=["test/completed"])
        run = await run_to_end(world.kit, f, ["a", "b", "c"])
        assert await world.settled(2) == [("succeeded", None)] * 2
    assert sorted(mailbox.envelopes) == [("ecluse@example.com", ["boss@example.com"]), ("ecluse@example.com", [TO])]
    mail = mailbox.taken[0]
    assert mail["Subject"] == f"Ecluse: test run {run['id']}: partial"
    assert mail["From"] == SENDER
    assert mail["To"] in (TO, "boss@example.com")
    assert mail["Auto-Submitted"] == "auto-generated"
    for kind in ("plain", "html"):
        text = unescape(mail.get_body((kind,)).get_content())
        for said in (f"{run['id']}", "partial", "NO_SUCH_ARTICLE", f"https://ecluse.example.com/ui/runs/{run['id']}"):
            assert said in text
    text = mail.get_body(("plain",)).get_content().replace("\r\n", "\n")
    assert "selected: 3\n  successful: 2\n  failed: 1\n  ignored: 0\n" in text


async def test_a_mail_about_an_event_without_a_run_leads_to_the_page_of_its_record(start_world):
    records = {
        "rule_run:7": "/ui/pricing/runs/7",
        "pricing_project:3": "/ui/pricing?project=3",
        "job:j-1": "/ui/jobs/j-1",
        "company:552032534": "/ui/requests?siren=552032534",
        "thing:4": None,
        "job:../x": "/ui/jobs/..%2Fx",
    }
    async with mail_server() as mailbox:
        pages = notify_setup(Settings(), "", None).pages
        world = await start_world(smtp=smtp_of(mailbox), public_url="https://ecluse.example.com/", pages=pages)
        await world.mail_endpoint(TO)
        async with world.kit.pool.connection() as connection, connection.transaction():
            told = [Event("default", one, f"about.{n}", one, {}, "test") for n, one in enumerate(records)]
            await write_events(connection, told)
        await world.settled(len(records))
    links = {mail["Subject"]: LINK.findall(mail.get_body(("plain",)).get_content()) for mail in mailbox.taken}
    assert links == {
        f"Ecluse: about.{n}": [f"https://ecluse.example.com{page}"] if page else []
        for n, page in enumerate(records.values())
    }


@pytest.mark.parametrize("path", notify_setup(Settings(), "", None).pages.values())
def test_the_pages_that_mails_lead_to_exist(path):
    asked = {"type": "http", "method": "GET", "path": path.format("1").partition("?")[0]}
    pages = [route for part in web.PARTS for route in part.routes.routes if route.path != "/ui/{rest:path}"]
    assert any(route.matches(asked)[0] is Match.FULL for route in pages)


async def one_never_ends(context: WorkContext, item: Item) -> Result:
    if item.key == "c":
        await asyncio.sleep(60)
    return await one_is_refused(context, item)


@pytest.mark.req("G-89")
async def test_a_mail_about_a_cancelled_run_says_by_whom_and_why_and_counts_it_apart(start_world, query):
    async with mail_server() as mailbox:
        world = await start_world(f := flow(stage(one_never_ends)), smtp=smtp_of(mailbox))
        await world.mail_endpoint(TO, events=["test/failed"])
        run_id = await started(world.kit, f, ["a", "b", "c"])
        await until(lambda: query("SELECT sum(succeeded + failed) FROM claims") == [(2,)])
        assert await end_run(world.kit, run_id, "wrong day", by="laptop")
        assert await world.settled() == [("succeeded", None)]
    (mail,) = mailbox.taken
    assert mail["Subject"] == f"Ecluse: test run {run_id}: cancelled"
    text = mail.get_body(("plain",)).get_content().replace("\r\n", "\n")
    counts = "selected: 3\n  successful: 1\n  failed: 1\n  ignored: 0\n  cancelled: 1\n"
    assert f"  status: cancelled\n  cancelled by: “laptop”\n  {counts}" in text
    assert "  reason: “wrong day”\n" in text


async def test_a_server_that_is_busy_is_asked_again_with_the_same_mail(start_world, query):
    async with mail_server(at_rcpt=["451 greylisted, come back"], at_data=["452 no room"]) as mailbox:
        world = await start_world(smtp=smtp_of(mailbox))
        await world.mail_endpoint(TO)
        await world.tell("thing.done")
        await world.next_try(1)
        await world.next_try(2)
        assert (await world.settled())[0][0] == "succeeded"
    assert len(mailbox.taken) == 1
    assert [tuple(row) for row in query("SELECT error_code, error FROM attempts ORDER BY id")] == [
        ("MAIL_DEFERRED", "the mail server: 451 greylisted, come back"),
        ("MAIL_DEFERRED", "the mail server: 452 no room"),
    ]
    name = query("SELECT result FROM items")[0][0]["answer"]
    assert name == "taken"
    assert query("SELECT sent_at IS NOT NULL FROM deliveries") == [(True,)]


async def test_an_address_that_is_refused_is_not_tried_again_and_costs_the_others_nothing(start_world):
    async with mail_server(at_rcpt=["550 no such user"]) as mailbox:
        world = await start_world(smtp=smtp_of(mailbox))
        await world.mail_endpoint(TO)
        await world.tell("thing.done")
        assert await world.settled() == [("failed", "MAIL_REFUSED")]
        await world.tell("thing.done", again=True)
        assert (await world.settled(2))[1] == ("succeeded", None)
    assert len(mailbox.taken) == 1


@pytest.mark.req("G-92")
async def test_a_connection_that_is_lost_once_the_server_has_the_text_is_not_repeated(start_world, query):
    async with mail_server(at_data=["CUT"]) as mailbox:
        world = await start_world(smtp=smtp_of(mailbox))
        await world.mail_endpoint(TO)
        await world.tell("thing.done")
        assert await world.settled() == [("failed", "MAY_HAVE_BEEN_SENT")]
        ((error, ambiguous),) = query("SELECT error, ambiguous FROM attempts")
    assert len(mailbox.taken) == 1
    assert "may have been sent" in error
    assert ambiguous


async def test_a_connection_that_is_lost_before_the_text_is_tried_again(start_world, query):
    async with mail_server(at_rcpt=["CUT"]) as mailbox:
        world = await start_world(smtp=smtp_of(mailbox))
        await world.mail_endpoint(TO)
        await world.tell("thing.done")
        await world.next_try(1)
        assert (await world.settled())[0][0] == "succeeded"
    assert query("SELECT error_code, ambiguous FROM attempts") == [("VENDOR_UNREACHABLE", False)]
    assert len(mailbox.taken) == 1


async def test_no_server_at_all_is_tried_again(start_world):
    async with mail_server() as mailbox:
        pass
    world = await start_world(smtp=smtp_of(mailbox))
    await world.mail_endpoint(TO)
    await world.tell("thing.done")
    await world.tried(1)
    assert world.states() == [("running", "VENDOR_UNREACHABLE")]


LANE = "SELECT trips FROM lanes WHERE name = 'mail'"


@pytest.mark.req("G-92")
@pytest.mark.parametrize("down", [nullcontext, overloaded_mail_server], ids=["refuses connections", "answers 421"])
async def test_a_server_that_is_down_for_minutes_costs_no_mail_its_tries(start_world, query, down):
    """Mails of a schedule have three tries. Each of them arrives once."""
    addresses = [f"ops{n}@example.com" for n in range(8)]
    async with mail_server() as nowhere:
        pass
    world = await start_world(smtp=smtp_of(nowhere))
    confirm(query, *addresses)
    async with down(nowhere.port):
        async with world.kit.pool.connection() as connection, connection.transaction():
            about = Event("default", "monday", "thing.done", "thing:1", {}, correlation_id="test")
            await notify(connection, [Recipient("mail", address) for address in addresses], about)
        await until(lambda: query(LANE)[0][0] > 0)
        for _ in range(6):
            trips = query(LANE)[0][0]
            await world.later(timedelta(seconds=30))
            await until(lambda trips=trips: query(LANE)[0][0] > trips)
        assert {state for state, _ in world.states()} == {"running"}
    async with mail_server(nowhere.port) as mailbox:
        await world.later(timedelta(seconds=30))
        assert await world.settled(8) == [("succeeded", None)] * 8
    assert sorted(mail["To"] for mail in mailbox.taken) == addresses


async def test_a_server_that_refuses_us_is_not_down(start_world, query):
    """A password that it does not take may be put right: tried as often as any mail, and the lane stays open."""
    async with mail_server() as mailbox:
        world = await start_world(smtp=smtp_of(mailbox, username="us", password="wrong"))  # noqa: S106 - no secret
        await world.mail_endpoint(TO)
        await world.tell(*["thing.done"] * 7)
        await world.tried(7)
        assert {code for _, code in world.states()} == {"MAIL_SERVER"}
    assert query("SELECT failures, trips FROM lanes WHERE name = 'mail'") == [(0, 0)]


@pytest.mark.req("G-92")
@pytest.mark.parametrize(
    ("left_behind", "ends", "sent"),
    [
        ("sending_at = NULL", ("succeeded", None), 1),
        ("sending_at = ecluse_now()", ("failed", "MAY_HAVE_BEEN_SENT"), 0),
        ("sending_at = ecluse_now(), sent_at = ecluse_now()", ("succeeded", None), 0),
    ],
    ids=["died before the text", "died with the text", "died after the answer"],
)
async def test_a_mail_that_a_worker_died_with_is_sent_at_most_once(start_world, query, left_behind, ends, sent):
    async with mail_server() as mailbox:
        world = await start_world(smtp=smtp_of(mailbox))
        async with world.kit.pool.connection() as connection:
            await pause_lane(connection, "mail", reason="test", by="test")
        await world.mail_endpoint(TO)
        await world.tell("thing.done")
        await until(world.states)
        query(f"UPDATE deliveries SET {left_behind}")  # noqa: S608 - of the table above
        query("UPDATE items SET crashes = 1")
        async with world.kit.pool.connection() as connection:
            await resume_lane(connection, "mail", reason="test", by="test")
        assert await world.settled() == [ends]
    assert len(mailbox.taken) == sent


@pytest.mark.req("G-92")
async def test_one_who_was_taken_for_dead_while_sending_and_the_one_who_took_over_send_once(start_world, query, dsn):
    async with mail_server(at_data=["250 taken"]) as mailbox:
        world = await start_world(smtp=smtp_of(mailbox))
        handle = mailbox.handle_DATA

        async def slowly(*given):
            query(TAKE_OVER)
            await until(lambda: query("SELECT 1 FROM attempts WHERE error_code = 'MAY_HAVE_BEEN_SENT'"))
            return await handle(*given)

        mailbox.handle_DATA = slowly
        await world.mail_endpoint(TO)
        await world.tell("thing.done")
        assert await world.settled() == [("failed", "MAY_HAVE_BEEN_SENT")]
        await until(lambda: mailbox.taken)
    assert len(mailbox.taken) == 1


async def test_without_a_mail_server_configured_it_waits_and_says_so(start_world):
    world = await start_world()
    await world.mail_endpoint(TO)
    await world.tell("thing.done")
    await world.tried(1)
    assert world.states() == [("running", "MAIL_NOT_CONFIGURED")]


def delivery(**changed) -> Delivery:
    message = {"type": "thing.done", "timestamp": "2026-01-01T00:00:00+00:00", "data": {}}
    facts = {"run_id": 1, "tenant_id": "default", "endpoint_id": 1, "kind": "mail", "recipient": TO}
    facts |= {"secret_name": None, "url_name": None, "event_key": "e1", "event_type": "thing.done", "about_run": None}
    facts |= {"message": message, "begun": False, "sent": False, "wanted": True, "confirmed": True, "rotating": False}
    facts |= {"dedup_key": None, "superseded": False, "too_early": False, "aggregate": None}
    return Delivery(**facts | changed)


def composed(one: Delivery, run=None):
    return compose(one, run, sender=SENDER, at=datetime.now(UTC), look=None)


INJECTED = "done\r\nBcc: all@example.com\r\n\r\nbody"


@pytest.mark.parametrize("where", ["event", "status", "data"])
def test_no_text_of_an_event_can_become_a_header(where):
    run = {"id": 7, "flow": "test", "status": INJECTED, "selected": None, "outcomes": {}, "reason": INJECTED}
    run |= dict.fromkeys(("state", "successful", "failed", "ignored", "cancelled", "selection_incomplete"))
    one = {
        "event": lambda: composed(delivery(event_type=INJECTED)),
        "status": lambda: composed(delivery(), run),
        "data": lambda: composed(
            delivery(message={"timestamp": "x", "data": {"note": INJECTED, "<script>": "<b>alert()</b>"}})
        ),
    }[where]()
    assert one["Bcc"] is None
    head = bytes(one).partition(b"\n\n")[0]
    assert b"\nBcc" not in head
    assert {name.lower() for name in one.keys()} <= {  # noqa: SIM118 - a mail's names, not a dict's
        *("subject", "from", "to", "date", "message-id", "auto-submitted", "mime-version", "content-type")
    }
    assert "<b>" not in one.get_body(("html",)).get_content()
    assert "<script>" not in one.get_body(("html",)).get_content()


def test_a_mail_counts_the_targets_of_each_reason():
    run = {"id": 7, "flow": "test", "status": "partial", "outcomes": {"successful": 3, "NOT_FOUND": 1, "TIMEOUT": 2}}
    run |= dict.fromkeys(("selected", "reason", "state", "successful", "failed", "ignored", "cancelled"))
    text = composed(delivery(), run | {"selection_incomplete": None}).get_body(("plain",)).get_content()
    assert "1 target\n" in text
    assert "2 targets\n" in text


def test_a_mail_has_one_name_and_hides_what_looks_secret():
    same = [composed(delivery(run_id=n)) for n in (1, 2)]
    assert same[0]["Message-ID"] == same[1]["Message-ID"]
    assert same[0]["Message-ID"].endswith("@example.com>")
    assert composed(delivery(event_key="e2"))["Message-ID"] != same[0]["Message-ID"]
    secret = composed(
        delivery(message={"timestamp": "x", "data": {"api_key": "hunter2", "u": "https://x/?sig=hunter2"}})
    )
    assert "hunter2" not in str(secret)


@pytest.mark.parametrize(
    ("knobs", "starttls"),
    [
        ({}, None),
        ({"SMTP_USERNAME": "us"}, True),
        ({"SMTP_USERNAME": "us", "SMTP_STARTTLS": "never"}, False),
        ({"SMTP_STARTTLS": "always"}, True),
    ],
    ids=str,
)
def test_a_password_is_not_sent_in_the_clear_unless_a_knob_allows_it(knobs, starttls):
    settings = Settings(SMTP_HOST="mail.example.com", MAIL_FROM=SENDER, **knobs)
    smtp = notify_setup(settings, "", None).smtp
    assert smtp is not None
    assert smtp.starttls is starttls
