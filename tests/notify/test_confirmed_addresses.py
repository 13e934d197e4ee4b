"""Mail addresses: asked for a confirmation by one mail, written to once it is given, and no more often than allowed."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest

from ecluse.base.errors import Conflict
from ecluse.engine import Event, PublishedEvent
from ecluse.notify import confirmation_requests, confirmation_tokens
from ecluse.notify.dispatch import Recipient, dispatch, notify, redeliver
from ecluse.notify.mail_text import without_links
from tests.notify.test_mails import TO, composed, delivery
from tests.support.engine_flows import flow, run_to_end, stage, until
from tests.support.notify_world import mail_server, smtp_of

PUBLIC = "https://ecluse.example.com/"


async def asked(world, *wanted):
    async with world.kit.pool.connection() as connection, connection.transaction():
        await confirmation_requests.ask(connection, "default", wanted)


async def confirmed(world, token):
    async with world.kit.pool.connection() as connection:
        return await confirmation_tokens.confirm(connection, token)


def token_in(mail) -> str:
    text = mail.get_body(("plain",)).get_content()
    assert '<a href="https://ecluse.example.com/ui/confirm?token=' in mail.get_body(("html",)).get_content()
    return re.search(r"https://ecluse\.example\.com/ui/confirm\?token=([\w-]+)", text)[1]


async def test_an_address_is_asked_once_and_gets_no_other_mail_before_it_has_confirmed(start_world, query):
    async with mail_server() as mailbox:
        world = await start_world(smtp=smtp_of(mailbox), public_url=PUBLIC)
        await world.mail_endpoint("Ops@example.com", confirmed=False)
        await asked(world, "Ops@example.com", "ops@EXAMPLE.com")
        await asked(world, "ops@example.com")
        await world.settled(1)
        await world.tell("thing.done")
        assert (await world.settled(2))[1] == ("failed", "NOT_CONFIRMED")
        (mail,) = mailbox.taken
        token = token_in(mail)
        assert token not in str(query("SELECT to_jsonb(d), i.result FROM deliveries d JOIN items i USING (run_id)"))
        assert token not in str(query("SELECT to_jsonb(m) FROM mail_addresses m"))
        assert await confirmed(world, token + "x") is None
        assert await confirmed(world, token) == ("default", "ops@example.com")
        assert await confirmed(world, token) is None, "good once"
        await world.tell("thing.done", again=True)
        assert (await world.settled(3))[2] == ("succeeded", None)
    assert len(mailbox.taken) == 2


async def test_a_link_expires_and_another_one_is_sent_on_request_but_not_within_the_hour(start_world, query):
    async with mail_server() as mailbox:
        world = await start_world(smtp=smtp_of(mailbox), public_url=PUBLIC)
        await asked(world, TO)
        await world.settled(1)
        async with world.kit.pool.connection() as connection:
            with pytest.raises(Conflict, match="another one can be sent at") as refused:
                await confirmation_requests.ask_again(connection, "default", TO)
            assert refused.value.code == "ASKED_ALREADY"
            with pytest.raises(Conflict, match="addresses confirm"):
                await redeliver(connection, "default", query("SELECT max(run_id) FROM deliveries")[0][0])
        await world.later(confirmation_tokens.LINK_LASTS)
        assert await confirmed(world, token_in(mailbox.taken[0])) is None, "expired"
        async with world.kit.pool.connection() as connection, connection.transaction():
            row, again = await confirmation_requests.ask_again(connection, "default", TO)
        assert (again, row["state"]) == (True, "asked")
        await world.settled(2)
        assert await confirmed(world, token_in(mailbox.taken[1])) == ("default", TO)
        async with world.kit.pool.connection() as connection:
            row, again = await confirmation_requests.ask_again(connection, "default", TO)
        assert (again, row["state"]) == (False, "confirmed")
    assert len(mailbox.taken) == 2


async def test_a_tenant_has_so_many_mails_a_day_and_further_ones_wait(start_world, query):
    async with mail_server() as mailbox:
        world = await start_world(smtp=smtp_of(mailbox), mails_per_day=2)
        query("INSERT INTO tenants (id, name, created_at) VALUES ('rival', 'Rival', ecluse_now())")
        await world.mail_endpoint(TO)
        await world.mail_endpoint("them@example.com", tenant="rival")
        await world.tell("thing.one", "thing.two", "thing.three")
        await until(lambda: ("running", "MAIL_LIMIT") in world.states())
        await world.tell("thing.one", tenant="rival")
        await until(lambda: len(mailbox.taken) == 3)
        assert query("SELECT tenant_id, sent FROM mail_counts ORDER BY 1") == [("default", 2), ("rival", 1)]
        assert query("SELECT failures, trips FROM lanes WHERE name = 'mail'") == [(0, 0)]
        await world.later(timedelta(days=1))
        assert await world.settled(4) == [("succeeded", None)] * 4
    assert len(mailbox.taken) == 4


async def test_a_recipient_gets_one_mail_about_the_end_of_a_run(start_world, query):
    """Several endpoints have the address, in two spellings, and so has the schedule; two events tell the end."""
    async with mail_server() as mailbox:
        world = await start_world(f := flow(stage()), smtp=smtp_of(mailbox))
        for address in (TO, TO.upper(), TO):
            await world.mail_endpoint(address, events=["test/completed", "test.run.completed"])
        run = await run_to_end(world.kit, f, ["a"])
        async with world.kit.pool.connection() as connection, connection.transaction():
            told = {"run_id": str(run["id"])}
            about = Event("default", "more", "test.run.completed", f"run:{run['id']}", told, correlation_id="test")
            await notify(connection, [Recipient("mail", TO)], about)
        await world.mail_endpoint("later@example.com", events=["thing.done"])
        await world.tell("thing.done")  # published after the events of the run
        await world.settled(2)
    assert len([mail for mail in mailbox.taken if f"run {run['id']}" in mail["Subject"]]) == 1


async def test_an_event_that_is_offered_again_after_its_mail_was_sent_is_no_other_mail(start_world, query):
    """Two endpoints have the address, and the end of the run is told by two events, each offered twice."""
    async with mail_server() as mailbox:
        world = await start_world(smtp=smtp_of(mailbox))
        for _ in range(2):
            await world.mail_endpoint(TO)
        kinds = ("test/completed", "test.run.completed")
        told = [
            PublishedEvent(n, "default", f"e{n}", kind, "run:7", "c", "ecluse", datetime.now(UTC), {}, None)
            for n, kind in enumerate(kinds, 1)
        ]
        for event in (*told, *told):
            await dispatch(world.kit.pool, [event])
            assert await world.settled() == [("succeeded", None)]
    assert len(mailbox.taken) == 1


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("Log in at https://evil.example/x", "Log in at https[:]//evil[.]example/x"),
        ("www.evil.example or //évil.example", "www[.]evil[.]example or //évil[.]example"),
        ("write to a@evil.example", "write to a[@]evil[.]example"),
        ("took 1.5 s. Twice", "took 1.5 s. Twice"),
        ("evil\u3002example evil\uff0eexample", "evil[\u3002]example evil[\uff0e]example"),
        ("https\uff1a\uff0f\uff0fevil a\uff20evil", "https[\uff1a]\uff0f\uff0fevil a[\uff20]evil"),
        ("evil\u200b.\u200bexample", "evil[.]example"),
        ("\u202eelpmaxe.live\u202c", "elpmaxe[.]live"),
    ],
)
def test_free_text_is_quoted_and_has_no_links(written, shown):
    assert without_links(written) == shown
    run = {"id": 7, "flow": "test", "status": "failed", "selected": None, "outcomes": {}, "reason": written}
    run |= dict.fromkeys(("state", "successful", "failed", "ignored", "cancelled", "selection_incomplete"))
    incomplete = {**run, "reason": None, "selection_incomplete": written, "outcomes": {written: 2}}
    cancelled = {**run, "reason": None, "state": "cancelled", "ended_by": written}
    noted = composed(delivery(message={"timestamp": "x", "data": {"note": written, written: "x"}}))
    for mail in (*(composed(delivery(), one) for one in (run, incomplete, cancelled)), noted):
        for kind in ("plain", "html"):
            text = mail.get_body((kind,)).get_content().replace("&amp;", "&")
            assert f"“{shown}”" in text
            assert written == shown or written not in text
