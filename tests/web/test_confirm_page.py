"""The page of the link that confirms a mail address: without a key, on a click, once."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from ecluse.notify import confirmation_tokens
from tests.support.pages import text

TO = "ops@example.com"


@pytest.fixture
def token(pages_dsn, fill):
    """A link that was sent."""
    fill("DELETE FROM mail_addresses")
    fill("INSERT INTO mail_addresses (tenant_id, address, asked_at) VALUES ('default', %s, ecluse_now())", TO)

    async def issue():
        async with await psycopg.AsyncConnection.connect(pages_dsn, autocommit=True) as connection:
            return await confirmation_tokens.issue(connection, "default", TO)

    return asyncio.run(issue())


def state(fill):
    return fill("SELECT state FROM mail_address_list")


def test_a_link_shows_what_it_confirms_and_a_click_confirms_it_once(reader, fill, token):
    stranger = reader.with_key(None)
    shown = stranger.get(f"/ui/confirm?token={token}")
    assert (shown.status, state(fill)) == (200, "asked"), "mail programs open links by themselves"
    assert TO in text(shown)
    assert shown.headers["Referrer-Policy"] == "same-origin"
    done = stranger.post("/ui/confirm", f"token={token}")
    assert (done.status, state(fill)) == (200, "confirmed")
    assert "Confirmed" in text(done)
    assert fill("SELECT actor FROM audit_trail WHERE action = 'address.confirm'") == f"mail:{TO}"
    for again in (stranger.post("/ui/confirm", f"token={token}"), stranger.get(f"/ui/confirm?token={token}")):
        assert again.status == 404
        assert "used already" in text(again)


@pytest.mark.parametrize("given", ["", "x", "%00", "é"])
def test_a_token_that_is_none_confirms_nothing(reader, fill, token, given):
    stranger = reader.with_key(None)
    assert stranger.get(f"/ui/confirm?token={given if given.isascii() else '%C3%A9'}").status == 404
    assert stranger.post("/ui/confirm", f"token={given}").status == 404
    assert stranger.post("/ui/confirm", f"token={token}", Origin="https://evil.example").status == 403
    assert state(fill) == "asked"


def test_a_link_that_has_expired_confirms_nothing(reader, fill, token):
    fill("UPDATE mail_addresses SET expires_at = ecluse_now()")
    assert reader.with_key(None).post("/ui/confirm", f"token={token}").status == 404
    assert state(fill) == "asked"
