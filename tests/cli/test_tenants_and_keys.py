"""`ecluse tenants` and `ecluse keys`: what an operator does before anybody can use the API, and what is recorded."""

from __future__ import annotations

import getpass

import pytest

from ecluse.access import keys
from tests.cli.test_mistakes import assert_refused

FLOW = "hello_flow:FLOW"
TRAIL = "SELECT tenant_id, actor, action, subject, reason FROM audit_trail ORDER BY id"


@pytest.mark.req("G-32", "G-33")
def test_tenants_and_keys_are_made_listed_and_taken_away_and_the_trail_tells(ecluse, query, one):
    assert ecluse("tenants", "create", "acme", "--name", "Acme Ltd").code == 0
    made = ecluse("keys", "create", "--tenant", "acme", "--role", "viewer", "--name", "dashboard", "--expires", "30d")
    assert made.code == 0
    key = made.out.strip()
    assert made.out == f"{key}\n"
    assert "not shown again" in made.err
    key_id, hashed, lifetime = one("SELECT id, hash, (expires_at - created_at)::text FROM api_keys")
    assert (bytes(hashed), lifetime[:7]) == (keys.digest(key), "30 days")

    listed = ecluse("keys", "list").out
    assert "dashboard" in listed
    assert "never used" in listed
    assert key not in listed
    assert "1 keys" in next(line for line in ecluse("tenants", "list").out.splitlines() if line.startswith("acme"))

    assert ecluse("keys", "revoke", str(key_id)).out == f"revoked key {key_id}\n"
    assert "already" in ecluse("keys", "revoke", str(key_id)).out
    assert "revoked" in ecluse("keys", "list", "--tenant", "acme").out
    assert ecluse("tenants", "disable", "acme", "--reason", "unpaid").code == 0
    assert "already" in ecluse("tenants", "disable", "acme", "--reason", "unpaid").out
    assert "disabled" in ecluse("tenants", "list").out
    assert ecluse("tenants", "enable", "acme").code == 0

    me = f"cli:{getpass.getuser()}"
    assert query(TRAIL) == [
        ("acme", me, "tenant.create", "tenant:acme", None),
        ("acme", me, "key.create", f"key:{key_id}", None),
        ("acme", me, "key.revoke", f"key:{key_id}", None),
        ("acme", me, "tenant.disable", "tenant:acme", "unpaid"),
        ("acme", me, "tenant.enable", "tenant:acme", None),
    ]


@pytest.mark.req("G-33")
def test_a_key_is_limited_to_groups_or_to_a_user_and_the_list_says_so(ecluse, query):
    common = ("keys", "create", "--role", "viewer")
    assert ecluse(*common, "--name", "g", "--scope", "GROUP", "--groupe", "Paris", "--groupe", "Lyon").code == 0
    assert ecluse(*common, "--name", "s", "--scope", "SELF", "--crm-user", "7").code == 0
    assert query("SELECT scope, groupes, crm_user_id FROM api_keys ORDER BY id") == [
        ("GROUP", ["Paris", "Lyon"], None),
        ("SELF", [], "7"),
    ]
    listed = ecluse("keys", "list").out.splitlines()
    assert [line.partition("  (")[2] for line in listed] == ["GROUP Paris, Lyon)", "SELF 7)"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("tenants", "create", "default"), "already"),
        (("tenants", "create", "a/b"), "1 to 100 letters"),
        (("tenants", "enable", "nobody"), "ecluse tenants create nobody"),
        (("keys", "create", "--tenant", "nobody", "--role", "admin", "--name", "x"), "ecluse tenants create nobody"),
        (("keys", "create", "--role", "admin", "--name", " "), "name"),
        (("keys", "create", "--role", "admin", "--name", "x", "--expires", "soon"), "30d"),
        (("keys", "create", "--role", "admin", "--name", "x", "--scope", "GROUP"), "names its groupes"),
        (("keys", "create", "--role", "admin", "--name", "x", "--groupe", "Paris"), "names its groupes"),
        (("keys", "create", "--role", "admin", "--name", "x", "--scope", "SELF"), "names its user"),
        (("keys", "create", "--role", "admin", "--name", "x", "--crm-user", "7"), "names its user"),
        (("keys", "revoke", "4711"), "ecluse keys list"),
        (("runs", "start", FLOW, "--tenant", "nobody"), "ecluse tenants create nobody"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_what_cannot_be_done_says_how(ecluse, query, command, said):
    assert_refused(ecluse(*command), said)
    assert query("SELECT 1 FROM audit_trail UNION ALL SELECT 1 FROM runs UNION ALL SELECT 1 FROM api_keys") == []


@pytest.mark.req("G-73")
def test_who_ended_a_run_from_the_command_line_is_recorded(ecluse, query):
    run_id = ecluse("runs", "start", FLOW).json["run_id"]
    for _ in range(2):
        ecluse("runs", "end", run_id, "--reason", "wrong catalogue", "--flow", FLOW, "--yes")
    me = f"cli:{getpass.getuser()}"
    assert query(TRAIL) == [("default", me, "run.end", f"run:{run_id}", "wrong catalogue")]


def test_a_server_whose_secret_key_does_not_fit_refuses_to_start(ecluse, query):
    query(
        "INSERT INTO secrets (tenant_id, name, key_id, nonce, ciphertext, updated_at)"
        " VALUES ('default', 'crm', 'another', '', '', ecluse_now())"
    )
    answer = ecluse("serve", "--port", "0", ECLUSE_SECRET_KEY="A" * 43 + "=", ECLUSE_LOG_LEVEL="ERROR")
    assert_refused(answer, "sealed with key another")
    assert query("SELECT count(*) FROM replicas") == [(0,)]


def test_what_people_call_things_does_not_move_the_terminal(ecluse, query):
    for table, columns, values in [
        ("tenants", "id, name, created_at", "'t', E'\\x1b[2J', now()"),
        ("api_keys", "tenant_id, name, hash, hint, role, created_at", "'t', E'\\x1b[2J', '', 'ecl_', 'admin', now()"),
        ("lanes", "name, held_until, held_reason", "'crm', now() + interval '1 hour', E'\\x1b[2J'"),
        (
            "schedules",
            "tenant_id, flow, name, zone_rules, handled_until, created_at, updated_at",
            "'t', 'hello', E'\\x1b[2J', '', now(), now(), now()",
        ),
    ]:
        query(f"INSERT INTO {table} ({columns}) VALUES ({values})")  # noqa: S608 - our own
    for command in ("tenants", "keys", "vendors", "schedules"):
        listed = ecluse(command, "list")
        assert (listed.code, "\\u001b[2J" in listed.out, "\x1b" in listed.out) == (0, True, False), listed
    refused = ecluse("leases", "release", "\x1b[2J", "--reason", "x")
    assert_refused(refused)
    assert "\x1b" not in refused.err


def test_a_filter_that_matches_nothing_does_not_say_that_there_is_nothing(ecluse):
    assert ecluse("keys", "list").out.startswith("no keys yet")
    assert ecluse("keys", "list", "--tenant", "acme").out == "no matching keys\n"
    assert ecluse("schedules", "list").out.startswith("no schedules yet")
    assert ecluse("schedules", "list", "--offset", "5").out == "no matching schedules\n"


def test_nothing_is_started_for_a_tenant_that_is_disabled_nor_under_an_empty_key(ecluse, one):
    ecluse("tenants", "create", "acme")
    ecluse("tenants", "disable", "acme", "--reason", "late")
    refused = ecluse("runs", "start", "hello_flow:FLOW", "--tenant", "acme")
    assert (refused.code, "disabled" in refused.err) == (2, True)
    assert ecluse("runs", "start", "hello_flow:FLOW", "--key", "").code == 2
    assert one("SELECT count(*) FROM runs") == 0
