"""`ecluse notifications`: who is told, what became of it, telling it again."""

from __future__ import annotations

import getpass

MADE = """
INSERT INTO notification_endpoints (tenant_id, kind, url, events, is_active, disabled_reason, created_at, updated_at)
VALUES ('default', 'webhook', 'https://hooks.example.com/?token=hunter2hunter2', '{hello/*}', true, NULL, now(), now()),
       ('default', 'webhook', 'https://old.example.com/', '{*}', false, 'answered 410 Gone', now(), now())
"""
TOLD = """
WITH run AS (
    INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, input, created_at, ended_at, error_code,
                      reason, end_cause, selected, successful, failed, ignored)
    VALUES ('default', 'notifications', 'notify-1-e1', false, 'failed', 'failed', '{}', now(), now(), 'TIMEOUT', 'slow',
            'catastrophic', 0, 0, 0, 0)
    RETURNING id)
INSERT INTO deliveries (run_id, tenant_id, endpoint_id, kind, recipient, event_key, event_type, message, created_at)
SELECT id, 'default', 1, 'webhook', 'https://hooks.example.com/?token=hunter2hunter2', 'e1', 'hello/completed', '{}',
       now() FROM run RETURNING run_id
"""


def test_who_is_told_and_what_became_of_it_is_listed_without_secrets(ecluse, query, one):
    assert (
        ecluse("notifications", "endpoints").out == "no endpoints: create one with POST /api/notifications/endpoints\n"
    )
    assert ecluse("notifications", "deliveries").out == "no deliveries yet\n"
    query(MADE)
    delivery = one(TOLD)
    listed = ecluse("notifications", "endpoints").out
    assert "hello/*" in listed
    assert "disabled: answered 410 Gone" in listed
    told = ecluse("notifications", "deliveries", "--state", "failed", "--endpoint", "1").out
    assert f"{delivery}  default" in told
    assert "TIMEOUT: slow" in told
    assert "hunter2" not in listed + told
    assert ecluse("notifications", "deliveries", "--state", "delivered").out == "no matching deliveries\n"


def test_a_delivery_is_repeated_once_at_a_time_and_recorded(ecluse, query, one):
    query(MADE)
    delivery = one(TOLD)
    answer = ecluse("notifications", "redeliver", str(delivery))
    new = one("SELECT max(run_id) FROM deliveries")
    assert (answer.code, answer.out) == (0, f"started delivery {new}\n")
    assert one("SELECT event_key FROM runs ORDER BY id DESC LIMIT 1") == "notify-1-e1-retry-1"
    assert one("SELECT actor, action, subject FROM audit_trail") == (
        f"cli:{getpass.getuser()}",
        "delivery.redeliver",
        f"delivery:{delivery}",
    )
    again = ecluse("notifications", "redeliver", str(delivery))
    assert (again.code, "is still pending" in again.err) == (2, True)
    unknown = ecluse("notifications", "redeliver", "999")
    assert (unknown.code, "there is no delivery 999" in unknown.err) == (2, True)
    assert "notifications" not in ecluse("runs", "list").out
    assert "notify-1-e1" in ecluse("runs", "list", "--flow", "notifications").out
