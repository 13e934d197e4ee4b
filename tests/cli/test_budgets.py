"""A budget over processes: what waits for it continues when it is raised, and a worker that is killed between the
reservation and the call leaves it counted once."""

from __future__ import annotations

import signal
from decimal import Decimal

from tests.support.transcription_world import TWELVE
from tests.support.waits import wait_for

KNOBS = {
    "CRM_API_KEY": "key",
    "ELEVENLABS_API_KEY": "key",
    "ELEVENLABS_PRICES": "scribe_v1=1",
    "TRANSCRIPTION_ELEVENLABS_RATE_LIMIT_PER_MINUTE": "60000",
    "TRANSCRIPTION_RECORDING_WORKER_CONCURRENCY": "4",
    "ECLUSE_HEARTBEAT_SECONDS": "0.5",
    "ECLUSE_DEAD_AFTER_SECONDS": "2",
    "ECLUSE_LOG_LEVEL": "WARNING",
}
CALLS = "SELECT count(*)::int, coalesce(sum(coalesce(cost, reserved)), 0) FROM paid_calls WHERE state = %s"


def test_a_worker_killed_after_it_has_reserved_leaves_it_counted_once(serve, ecluse, sandbox, query):
    knobs = KNOBS | {"CRM_BASE_URL": f"{sandbox.url}/crm", "ELEVENLABS_BASE_URL": f"{sandbox.url}/elevenlabs"}
    first = serve(**knobs)
    first.wait_until_ready()
    assert first.done("budgets", "set", "0.001", "--period", "month")["amount"] == "0.001"
    run = first.done("transcriptions", "start", TWELVE)["run_id"]
    told = wait_for(lambda: (told := first.done("runs", "why", run))["blocked"] and told["total"] == 12 and told)
    assert [group["cause"] for group in told["groups"]] == ["budget"]
    assert (
        "month's budget of tenant default has 0.001 left, too little for this call (0 of 0.001 spent, 0 reserved"
        in told["summary"]
    )
    first.done("budgets", "set", "0", "--period", "month")
    refused = first.ecluse("transcriptions", "start", "9000")
    assert refused.code != 0
    assert "BUDGET_EXCEEDED" in refused.out + refused.err
    first.end(signal.SIGTERM)
    assert sandbox.ledger(vendor="elevenlabs", kind="paid") == []
    # This worker dies at its first calls, after the reservation is committed and before anything is sent.
    dying = serve("--role", "worker", **knobs, ECLUSE_CRASH_AT="after reserve")
    api = serve("--role", "api", **knobs)
    api.wait_until_ready()
    api.done("budgets", "set", "105", "--period", "month")  # ten of the longest recordings
    assert dying.process.wait(30) == -signal.SIGKILL
    held, reserved = query(CALLS, "reserved")[0]
    assert 1 <= held <= 4
    assert sandbox.ledger(vendor="elevenlabs", kind="paid") == []
    for _ in range(2):
        serve("--role", "worker", **knobs)
    wait_for(lambda: query("SELECT 1 FROM runs WHERE ended_at IS NOT NULL"))
    assert query("SELECT status, selected, successful FROM runs") == [("completed", 12, 12)]
    wait_for(lambda: query(CALLS, "unknown") == [(held, reserved)])  # by the next sweep
    settled, cost = query(CALLS, "settled")[0]
    assert settled == len(sandbox.ledger(vendor="elevenlabs", kind="paid")) == 12
    (budget,) = api.done("budgets", "list")["budgets"]
    spent = round(reserved + cost, 6)  # as it is shown
    assert Decimal(budget["spent"]) == spent <= Decimal(budget["amount"])
    assert Decimal(api.done("runs", "show", run)["cost"]) == spent
    audited = ecluse("verify")
    assert audited.code == 0, audited.out
