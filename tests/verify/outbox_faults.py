"""Faults of events and leases, one each, and what only looks like one."""

from __future__ import annotations

from tests.verify.plants import Fault, Plant, of, sql, then
from tests.verify.world import DIED

UNPUBLISHED = "published_seq = NULL, published_at = NULL"
LONG_AGO = "occurred_at = now() - interval '2 minutes'"

OUTBOX_FAULTS = [
    Fault(
        "I-09",
        "a start published twice",
        "started was published 2 times",
        lambda world: world.event(f"run:{world.runs['published']}", "twice", "shop/started", {}),
    ),
    Fault(
        "I-09",
        "a selection published twice",
        "selected was published 2 times",
        lambda world: world.event(
            f"run:{world.runs['published']}",
            "twice",
            "shop/selected",
            {"run_id": str(world.runs["published"]), "selected": 0},
        ),
    ),
    Fault(
        "I-09",
        "an end not published",
        "its end was published 0 times",
        sql("DELETE FROM events_outbox WHERE event_key = 'published:completed'"),
    ),
    Fault(
        "I-09",
        "an end published of an open run",
        "but the run is open",
        lambda world: world.event(f"run:{world.runs['new']}", "new:failed", "shop/failed", {}, published=False),
    ),
    Fault(
        "I-09",
        "an end published with another status",
        "published shop/completed with",
        of("published:completed", "events_outbox", """payload = payload || '{"status": "partial"}'"""),
    ),
    Fault(
        "I-09",
        "an end published with other counts",
        "published shop/completed with",
        of("published:completed", "events_outbox", """payload = payload || '{"failed": 1}'"""),
    ),
    Fault(
        "I-09",
        "a selection published with another count",
        "published shop/selected with",
        of("published:selected", "events_outbox", """payload = payload || '{"selected": 1}'"""),
    ),
    Fault(
        "I-09",
        "a normal end published as a failure",
        "published shop/failed with",
        of("published:completed", "events_outbox", "event_type = 'shop/failed'"),
    ),
    Fault(
        "I-09",
        "an event of a run that was rolled back",
        "a run that does not exist",
        lambda world: world.event("run:99", "ghost:started", "shop/started", {}),
    ),
    Fault(
        "I-09",
        "an event of another tenant's run",
        "a run that does not exist",
        of("new:started", "events_outbox", "tenant_id = 'other'"),
    ),
    Fault(
        "I-09",
        "published in the wrong order",
        "but the earlier event",
        of("published:selected", "events_outbox", "published_seq = published_seq + 100"),
    ),
    Fault(
        "I-09",
        "overtaken by a later one",
        "published, but the earlier event",
        of("published:selected", "events_outbox", UNPUBLISHED),
    ),
    Fault("I-09", "never published", "but is not published", of("new:started", "events_outbox", LONG_AGO)),
    Fault(
        "I-09",
        "given up on",
        "but is not published",
        of("fiche-0", "events_outbox", "try_at = now() - interval '2 minutes'"),
    ),
    #
    Fault(
        "I-10",
        "held by two",
        "while number 4 is held",
        then(
            lambda world: world.sql("DROP INDEX leases_held"),
            of("a 4", "leases", "ended_at = NULL, end_cause = NULL, expires_at = now() + ttl"),
        ),
    ),
    Fault(
        "I-10",
        "taken before it was free",
        "but number 4 was held until",
        of("a 4", "leases", "ended_at = now() + interval '1 second'"),
    ),
    Fault(
        "I-10",
        "an older number given out again",
        "was held until",
        of("a 2", "leases", "acquired_at = now(), ended_at = now()"),
    ),
    Fault("I-10", "ended before it began", "before it was acquired", of("a 1", "leases", "ended_at = '2020-01-01'")),
    Fault("I-10", "a take-over not counted", "attempt 1 after attempt 1", of("a 3", "leases", "attempt = 1")),
    Fault("I-10", "a run that ended and holds", "ended at", of("of a run 1", "leases", "run_id = 1")),
    Fault("I-10", "a run that is not there and holds", "does not exist", of("of a run 1", "leases", "run_id = 99")),
    #
    Fault(
        "I-19",
        "a lease of the dead",
        "but expired at",
        of("a 5", "leases", f"replica_id = '{DIED}', expires_at = now() - interval '2 minutes'"),
    ),
]

OUTBOX_HARMLESS: dict[str, Plant] = {
    "a lease that expired a moment ago": of("a 5", "leases", "expires_at = now() - interval '3 seconds'"),
    "a run from before there were events": sql("DELETE FROM events_outbox WHERE event_key LIKE 'published:%%ed'"),
}
