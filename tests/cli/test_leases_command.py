"""`ecluse leases`: what an operator sees of a blocked key, and what releasing it by force leaves behind."""

from __future__ import annotations

import getpass

import pytest

HELD = (
    "INSERT INTO leases (tenant_id, key, fence, owner, ttl, acquired_at, expires_at, token)"
    " VALUES ('acme', 'fiche:1', 1, 'worker', '120 s', ecluse_now(), ecluse_now() + interval '120 s', %s)"
)
TOKEN = "0123abcd-0000-4000-8000-000000000000"  # noqa: S105


@pytest.mark.req("ENG-36", "ENG-88")
def test_what_is_held_is_listed_without_the_whole_token(ecluse, query):
    assert ecluse("leases", "list").out == "no leases are held\n"
    query(HELD, TOKEN)
    for scope in ((), ("--tenant", "acme")):
        shown = ecluse("leases", "list", *scope).out
        assert "fiche:1" in shown
        assert "worker" in shown
        assert "token 0123abcd…" in shown
        assert TOKEN not in shown
    assert ecluse("leases", "list", "--tenant", "other").out == "no leases are held\n"


@pytest.mark.req("ENG-38")
def test_a_release_by_force_says_who_and_why(ecluse, query, one):
    query(HELD, TOKEN)
    refused = ecluse("leases", "release", "fiche:1", "--tenant", "acme", "--reason", " ")
    assert (refused.code, "say why" in refused.err) == (2, True)
    answer = ecluse("leases", "release", "fiche:1", "--tenant", "acme", "--reason", "worker hangs")
    assert (answer.code, answer.out) == (0, "released lease fiche:1\n")
    row = one("SELECT end_cause, reason, ended_by FROM leases")
    assert row == ("forced", "worker hangs", f"cli:{getpass.getuser()}")
    assert one("SELECT actor, action, subject, reason FROM audit_trail") == (
        f"cli:{getpass.getuser()}",
        "lease.release",
        "lease:fiche:1",
        "worker hangs",
    )
    again = ecluse("leases", "release", "fiche:1", "--tenant", "acme", "--reason", "again")
    assert (again.code, "No lease 'fiche:1' of tenant 'acme' is held" in again.err) == (2, True)
