"""A server that is killed in the middle of a transcription: another one goes on, and nothing is told twice."""

from __future__ import annotations

import signal
import time

import pytest

from tests.support.transcription_world import TWELVE

HANDS = 2
KNOBS = {
    "CRM_API_KEY": "key",
    "ELEVENLABS_API_KEY": "key",
    "TRANSCRIPTION_ELEVENLABS_RATE_LIMIT_PER_MINUTE": "60000",
    "TRANSCRIPTION_RECORDING_WORKER_CONCURRENCY": str(HANDS),
    "ECLUSE_HEARTBEAT_SECONDS": "0.5",
    "ECLUSE_DEAD_AFTER_SECONDS": "2",
    "ECLUSE_LOG_LEVEL": "WARNING",
}
EVENTS = """
SELECT event_type, count(*)::int FROM events_outbox WHERE event_type ~ '[.]' OR starts_with(event_type, 'fiche/')
GROUP BY 1
"""


def wait_for(true, what, seconds=60):
    until = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < until, what
        time.sleep(0.05)
    return found


@pytest.mark.req("TRX-01", "TRX-78", "TRX-49", "TRX-80", "G-80", "G-25", "TRX-71")
def test_what_one_server_began_another_one_ends(serve, ecluse, sandbox, query):
    sandbox.set_faults([{"kind": "latency", "seconds": 1.5, "vendor": "elevenlabs"}])
    knobs = KNOBS | {"CRM_BASE_URL": f"{sandbox.url}/crm", "ELEVENLABS_BASE_URL": f"{sandbox.url}/elevenlabs"}
    first = serve(**knobs)
    first.wait_until_ready()
    started = first.done("transcriptions", "start", TWELVE)
    wait_for(lambda: len(sandbox.ledger(vendor="elevenlabs", kind="paid")) >= 2, "nothing is transcribed")
    assert first.end(signal.SIGKILL)[0] == -signal.SIGKILL
    sandbox.set_faults([])
    left = query("SELECT count(*) FROM items WHERE status = 'open'")[0][0]
    assert left > 0, "it was over before the kill: the test proves nothing"
    assert query("SELECT count(*) FROM leases WHERE ended_at IS NULL AND key LIKE '%%:fiche:%%'") == [(1,)]
    second = serve("--role", "api", **knobs)
    again = second.done("transcriptions", "start", TWELVE)
    assert (again["attached"], again["run_id"]) == (True, started["run_id"])
    serve(**knobs).wait_until_ready()
    wait_for(lambda: query("SELECT 1 FROM runs WHERE ended_at IS NOT NULL"), "nobody goes on")
    assert query("SELECT status, selected, successful FROM runs") == [("completed", 12, 12)]
    assert query("SELECT count(*) FROM recordings WHERE has_transcription") == [(12,)]
    told = dict(query(EVENTS))
    assert told == {
        "fiche/transcribe": 2,
        "transcription.status_check": 2,
        "transcription.started": 1,
        "transcription.completed": 1,
        "fiche/transcribed": 1,
    }
    # Only what was in hand when it was killed may have been paid for twice, and then that is noted.
    paid = [entry["ref"] for entry in sandbox.ledger(vendor="elevenlabs", kind="paid")]
    noted = query("SELECT count(*)::int FROM attempts WHERE maybe_paid")[0][0]
    assert len(set(paid)) == 12
    assert len(paid) - 12 <= noted <= HANDS
    audited = ecluse("verify")
    assert audited.code == 0, audited.out
