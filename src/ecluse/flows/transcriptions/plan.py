"""Planning of many runs at once from the database: which recordings exist, which are transcribed already, which are
targets. The same transaction stores the counts, acquires the leases, writes the events and opens the stages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from ecluse.db.connect import Connection
from ecluse.db.query import as_json, fetch_rows
from ecluse.engine import Event, Lane, NewItem, Run, Stage, hold_for_runs, open_stage, select_targets, write_events
from ecluse.flows.connections import lanes
from ecluse.flows.transcriptions import rules, traces
from ecluse.flows.transcriptions.config import Config
from ecluse.flows.transcriptions.rules import Counts

SAMPLE = 20  # call ids in a log line

# Recordings removed in the CRM are not counted.
FACTS = """
SELECT t.run_id, t.fiche_id, f.id, count(r.id)::int, (count(r.id) FILTER (WHERE r.has_transcription))::int,
       coalesce(jsonb_agg(jsonb_build_object('id', r.id::text, 'call', r.call_id, 'url', r.recording_url)
                          ORDER BY r.start_time NULLS LAST, r.call_id) FILTER (WHERE NOT r.has_transcription), '[]'),
       extract(epoch FROM ecluse_now() - u.created_at)::float8
FROM transcription_runs t JOIN runs u ON u.id = t.run_id
LEFT JOIN fiche_cache f ON f.tenant_id = t.tenant_id AND f.fiche_id = t.fiche_id
LEFT JOIN recordings r ON r.fiche_cache_id = f.id AND r.removed_at IS NULL
WHERE t.run_id = ANY(%s) GROUP BY t.run_id, f.id, u.created_at
"""

PAID = """
SELECT s.tenant_id, s.key FROM unnest(%s::text[], %s::bytea[]) AS k(tenant_id, key)
JOIN speech_results s ON s.tenant_id = k.tenant_id AND s.key = k.key
"""

STORE = """
UPDATE transcription_runs t SET fiche_cache_id = p.fiche_cache_id, total_recordings = p.total_recordings,
    already_transcribed = p.already_transcribed, target_total = p.target_total
FROM jsonb_to_recordset(%s::jsonb) AS p(run_id bigint, fiche_cache_id bigint, total_recordings integer,
    already_transcribed integer, target_total integer)
WHERE t.run_id = p.run_id
"""


class UntranscribedRecording(NamedTuple):
    """A recording without a transcript."""

    call_id: str
    url: str
    key: bytes  # of its paid result, see `rules.speech_key`


class Plan(NamedTuple):
    """The plan of a run: its recordings without a transcript, and its counts."""

    run: Run
    fiche_id: str
    fiche_cache_id: int | None
    counts: Counts
    targets: Sequence[UntranscribedRecording]
    seconds: float  # since the run was created

    @property
    def priority(self) -> Any:
        return self.run.input["priority"]

    def items(
        self, paid: Collection[tuple[str, bytes]], needs_no_call: bool | None, lane: Lane | None = None
    ) -> list[NewItem]:
        """Return the items of the recordings that need no call (`needs_no_call` True), of those for the provider
        (False), or of all (None). `paid`: the paid results that exist, as (tenant, key); `lane`: see `NewItem`."""
        made = []
        for index, target in enumerate(self.targets, 1):
            is_paid = (self.run.tenant_id, target.key) in paid
            if needs_no_call is None or needs_no_call == (is_paid or not target.url.strip()):
                payload = {
                    "fiche_id": self.fiche_id,
                    "fiche_cache_id": str(self.fiche_cache_id),
                    "call_id": target.call_id,
                    "index": index,
                    "total": len(self.targets),
                    "paid": target.key.hex() if is_paid else None,
                }
                # Fiche ids are unique per tenant only.
                group = f"{self.run.tenant_id}/{self.fiche_id}"
                made.append(NewItem(target.call_id, payload=payload, group=group, lane=lane))
        return made


async def plan(
    connection: Connection, runs: Sequence[Run], known: Stage, recordings: Stage, config: Config
) -> list[Plan]:
    """Plan these runs, in the caller's transaction: store counts, acquire the leases on recordings, select the targets,
    open the stages `known` and `recordings`, and write the events."""
    plans = await _facts(connection, runs, config)
    paid = await _paid_for(connection, plans)
    rows = [{"run_id": one.run.id, "fiche_cache_id": one.fiche_cache_id, **one.counts.as_dict()} for one in plans]
    await connection.execute(STORE, (as_json(rows),))
    # A lock that another run or process holds is not waited for: `precheck` reads the holder again before the call.
    locks = [
        (one.run.id, one.run.tenant_id, rules.recording_lock(one.fiche_id, target.call_id))
        for one in plans
        for target in one.targets
    ]
    if locks:
        await hold_for_runs(connection, locks)
    await select_targets(connection, {one.run.id: one.items(paid, None) for one in plans})
    lane = await lanes.of_tenants(connection, "speech", recordings.lane, {run.tenant_id for run in runs})
    for priority in sorted({one.priority for one in plans}):
        some = [one for one in plans if one.priority == priority]
        here = [(one.run, items) for one in some if (items := one.items(paid, True))]
        await open_stage(connection, known, here, priority=priority)
        there = [(one.run, one.items(paid, False, lane[one.run.tenant_id])) for one in some]
        await open_stage(connection, recordings, there, priority=priority)
    await write_events(connection, [event for one in plans for event in _events_of(one)])
    for one in plans:
        _trace(one, config)
    return plans


def _trace(one: Plan, config: Config) -> None:
    """Log the plan of a run."""
    tracer = traces.orchestrator(one.run, one.fiche_id)
    tracer.fan_out(
        "transcription/recording.transcribe",
        len(one.targets),
        [],
        call_ids=[target.call_id for target in one.targets[:SAMPLE]],
        minutes_at_least=rules.minutes_needed(len(one.targets), config.per_minute),
        **one.counts.as_dict(),
    )
    if not one.run.input["wait_for_completion"]:
        tracer.end("enqueued", one.seconds)


async def _facts(connection: Connection, runs: Sequence[Run], config: Config) -> list[Plan]:
    """Return the plans of these runs, computed from the recordings in the database."""
    by_id = {run.id: run for run in runs}
    rows = await fetch_rows(connection, FACTS, (list(by_id),))
    return [
        Plan(
            by_id[run_id],
            fiche_id,
            cache_id,
            Counts(total, already, len(open_)),
            [
                UntranscribedRecording(
                    one["call"], one["url"], rules.speech_key(one["call"], one["url"], config.speech)
                )
                for one in open_
            ],
            seconds,
        )
        for run_id, fiche_id, cache_id, total, already, open_, seconds in rows
    ]


async def _paid_for(connection: Connection, plans: Sequence[Plan]) -> set[tuple[str, bytes]]:
    """Return the (tenant, key) pairs of the planned recordings that have a paid result already."""
    keys = [(one.run.tenant_id, target.key) for one in plans for target in one.targets if target.url.strip()]
    if not keys:
        return set()
    rows = await fetch_rows(connection, PAID, ([tenant for tenant, _ in keys], [key for _, key in keys]))
    return {(tenant, bytes(key)) for tenant, key in rows}


def _events_of(one: Plan) -> list[Event]:
    """Return the events about a plan: the status check and the start."""
    run, fiche_id = one.run, one.fiche_id
    payloads = {
        "transcription.status_check": rules.status_check(fiche_id, run.id, one.counts),
        "transcription.started": rules.started(fiche_id, run.id, one.counts, one.priority),
    }
    return [event_of(run, name, payload) for name, payload in payloads.items()]


def event_of(run: Run, name: str, payload: dict[str, Any], suffix: str = "") -> Event:
    """Return an event of a run. Its key deduplicates: one event per run, name and suffix."""
    return Event(
        tenant_id=run.tenant_id,
        event_key=f"{run.event_key}:{name}{suffix}",
        event_type=name,
        aggregate=f"run:{run.id}",
        payload=payload,
        correlation_id=run.correlation_id or run.event_key,
    )
