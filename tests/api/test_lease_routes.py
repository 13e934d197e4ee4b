"""Leases over HTTP: one's own are listed, and taken away with a reason that is recorded."""

from __future__ import annotations

import pytest

from ecluse.api.leases import LEASES
from tests.support.api_server import add_tenant, new_key

HOLD = """
INSERT INTO leases (tenant_id, key, fence, owner, ttl, acquired_at, expires_at)
VALUES (%s, 'fiche:7', 1, 'somebody', '2 minutes', ecluse_now(), ecluse_now() + interval '2 minutes')
"""


@pytest.mark.req("G-73", "ENG-38", "ENG-88")
def test_a_lease_is_listed_without_its_token_and_released_once_with_a_reason(api, query, one):
    query(HOLD, "default")
    (lease,) = LEASES.page.model_validate(api.get("/api/leases").json).leases
    assert (lease.key, lease.owner) == ("fiche:7", "somebody")
    assert len(lease.token) == 8

    answer = api.post("/api/leases/release", {"key": "fiche:7", "reason": "holder is gone"})
    assert (answer.status, answer.json) == (200, {"key": "fiche:7", "released": True})
    again = api.post("/api/leases/release", {"key": "fiche:7", "reason": "holder is gone"})
    assert (again.status, again.code) == (404, "NOT_FOUND")
    key_id = one("SELECT id FROM api_keys")
    assert one("SELECT end_cause, reason, ended_by FROM leases") == ("forced", "holder is gone", f"key:{key_id}")
    assert query("SELECT actor, action, subject, reason FROM audit_trail") == [
        (f"key:{key_id}", "lease.release", "lease:fiche:7", "holder is gone")
    ]


@pytest.mark.req("ENG-106")
def test_another_tenants_lease_cannot_be_seen_or_released(api, dsn, query, one):
    add_tenant(dsn, "rival")
    query(HOLD, "default")
    rival = api.with_key(new_key(dsn, "admin", "rival"))
    assert rival.get("/api/leases").json["leases"] == []
    answer = rival.post("/api/leases/release", {"key": "fiche:7", "reason": "mine now"})
    assert (answer.status, answer.code) == (404, "NOT_FOUND")
    assert one("SELECT ended_at FROM leases") is None


@pytest.mark.parametrize("body", [{}, {"key": "x"}, {"key": "x", "reason": " "}, {"key": "", "reason": "x"}])
def test_a_lease_is_not_released_without_a_key_and_a_reason(shared_api, body):
    answer = shared_api.post("/api/leases/release", body)
    assert (answer.status, answer.code) == (422, "INVALID_INPUT")
