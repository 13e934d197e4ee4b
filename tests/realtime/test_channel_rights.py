"""Who may listen to what, by socket and by stream: every kind of channel, every kind of caller."""

from __future__ import annotations

from datetime import timedelta

import psycopg
import pytest

from ecluse.access.permissions import ROLES
from tests.realtime.clients import Stream
from tests.support.api_server import add_tenant, new_key

FORM = "application/x-www-form-urlencoded"
CALLERS = ("no key", "garbage", "expired", "viewer", "operator", "admin", "SELF", "GROUP", "rival", "closed")
ALL = {"viewer", "operator", "admin"}
FICHE = """
WITH f AS (
    INSERT INTO fiche_cache (tenant_id, fiche_id, created_at, updated_at)
    VALUES ('default', %s, ecluse_now(), ecluse_now()) RETURNING id)
INSERT INTO fiche_cache_information (fiche_cache_id, groupe, attribution_user_id, updated_at)
SELECT id, %s, %s, ecluse_now() FROM f
"""


@pytest.fixture(scope="module")
def callers(live_dsn):
    add_tenant(live_dsn, "closed")
    keys = {role: new_key(live_dsn, role) for role in ("viewer", "operator", "admin")}
    keys |= {"no key": None, "garbage": "ecl_" + "x" * 43}
    keys |= {scope: new_key(live_dsn, "admin") for scope in ("SELF", "GROUP")}
    keys |= {"rival": new_key(live_dsn, "admin", "rival"), "closed": new_key(live_dsn, "admin", "closed")}
    keys["expired"] = new_key(live_dsn, "admin", expires_in=timedelta(microseconds=1))
    with psycopg.connect(live_dsn, autocommit=True) as connection:
        for scope in ("SELF", "GROUP"):
            connection.execute(
                "UPDATE api_keys SET scope = %s, crm_user_id = '7', groupes = '{north}' WHERE hint = %s",
                (scope, keys[scope][:8]),
            )
        for fiche, user, groupe in (("301", "7", "north"), ("302", "8", "south")):
            connection.execute(FICHE, (fiche, groupe, user))
        connection.execute("UPDATE tenants SET disabled_at = ecluse_now() WHERE id = 'closed'")
    return keys


@pytest.fixture(scope="module")
def run_id(live):
    return live.post("/api/runs", {"flow": "test", "key": "rights"}).json["run_id"]


def table(run_id):
    """Who may: those of scope ALL, and who sees that fiche; another tenant has channels of the same name of its own."""
    return {
        "private-fiche-301": ALL | {"rival", "SELF", "GROUP"},
        "private-fiche-302": ALL | {"rival"},
        "private-job-automation-run-301": ALL | {"rival"},
        "private-job-cmf1w2x3y0000abcdefghijkl": ALL | {"rival"},
        "private-job-7": ALL | {"rival"},
        f"private-run-{run_id}": ALL,
        "private-run-999999999": set(),
        "private-run-0": set(),
        "private-run-1e3": set(),
        "private-run-99999999999999999999": set(),
        "private-user-1": set(),
        "private-encrypted-fiche-301": set(),
        "presence-fiche-301": set(),
        "private-fiche-": set(),
        "*": set(),
    }


@pytest.mark.req("ENG-78", "G-33")
def test_the_right_to_a_channel_is_that_to_read_the_same(live, callers, run_id):
    wrong = []
    for channel, allowed in table(run_id).items():
        for who in CALLERS:
            server = live.with_key(callers[who])
            expected = 200 if who in allowed else 401 if who in ("no key", "garbage", "expired") else 403
            form = f"socket_id=1.2&channel_name={channel}".encode()
            answer = server.post("/pusher/auth", raw=form, headers={"Content-Type": FORM})
            stream = Stream(server, channel)
            stream.close()
            if (answer.status, stream.status) != (expected, expected):
                wrong.append((channel, who, answer.status, stream.status, expected))
    assert wrong == []


@pytest.mark.req("ENG-78", "ENR-76")
@pytest.mark.parametrize(
    ("missing", "refused", "allowed"),
    [
        ("requests.read", "private-job-7", "private-job-automation-run-7"),
        ("automation.read", "private-job-automation-run-7", "private-job-7"),
    ],
)
def test_jobs_of_enrichment_and_of_automation_need_their_own_permission(
    live, callers, monkeypatch, missing, refused, allowed
):
    monkeypatch.setitem(ROLES, "viewer", ROLES["viewer"] - {missing})
    viewer = live.with_key(callers["viewer"])
    for channel, status in ((refused, 403), (allowed, 200)):
        form = f"socket_id=1.2&channel_name={channel}".encode()
        assert viewer.post("/pusher/auth", raw=form, headers={"Content-Type": FORM}).status == status
        stream = Stream(viewer, channel)
        stream.close()
        assert stream.status == status


@pytest.mark.req("ENG-78")
def test_everything_of_a_tenant_is_for_those_who_see_all_of_it(live, callers):
    for who in CALLERS:
        stream = Stream(live.with_key(callers[who]))
        stream.close()
        unknown = who in ("no key", "garbage", "expired")
        assert stream.status == (200 if who in ALL | {"rival"} else 401 if unknown else 403), who


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b'{"socket_id": "1.2", "channel_name": "private-fiche-1"}', "application/json", 415),
        (b"socket_id=1.2&channel_name=private-fiche-1", "text/plain", 415),
        (b"socket_id=1.2&channel_name=private-fiche-1&socket_id=1.3", FORM, 422),
        (b"socket_id=1.2", FORM, 422),
        (b"", FORM, 422),
        (b"socket_id=one&channel_name=private-fiche-1", FORM, 422),
        (b"socket_id=1.2%00&channel_name=private-fiche-1", FORM, 422),
        (b"socket_id=1.2&channel_name=fiche-1", FORM, 403),
        (b"socket_id=1.2&channel_name=%FF%FE", FORM, 403),
        (b"socket_id=1.2&channel_name=private-fiche-1&extra=1", FORM, 200),
    ],
)
def test_a_form_that_cannot_be_used_is_refused(live, body, kind, status):
    answer = live.post("/pusher/auth", raw=body, headers={"Content-Type": kind})
    assert answer.status == status, answer.body
    if status != 200:
        assert answer.code
