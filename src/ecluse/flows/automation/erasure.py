"""Erasure of a fiche: its data, recordings, transcripts and audits are deleted; of the runs it was part of, ids, counts
and outcomes stay. Automation depends on the flows of fiches, transcriptions and audits, and so knows all of their
tables."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from ecluse.access.envelope import Refused
from ecluse.base.errors import NotFound
from ecluse.base.text import first_few
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_column, fetch_row, fetch_value
from ecluse.engine import lock_runs
from ecluse.flows.transcriptions import rules
from ecluse.retention import erasure
from ecluse.retention.erasure import Erasure

FICHE = "t.tenant_id = %(tenant)s AND t.fiche_id = %(target)s"
IDS = "SELECT f.id FROM fiche_cache f WHERE f.tenant_id = %(tenant)s AND f.fiche_id = %(target)s"
DATA = erasure.WORDS.format(payload="(t.message -> 'data')")
SUMMARY = erasure.WORDS.format(payload="t.result_summary")

# Rows that other statements refer to are deleted last. Rows that would be deleted by cascade with the fiche have
# statements of their own, so that they are counted.
OF_THE_FICHE = (
    Erasure("paid results", "speech_results", "t.tenant_id = %(tenant)s AND t.call_id = ANY(%(calls)s)"),
    Erasure(
        "fiches in runs",
        "automation_run_fiches",
        """t.run_id = ANY(%(shared)s) AND t.fiche_id = %(target)s
        AND (t.erased_at IS NULL OR t.fiche_cache_id IS NOT NULL)""",
        """erased_at = ecluse_now(), fiche_cache_id = NULL, erased_audits = coalesce(t.erased_audits, 0) + (
            SELECT count(*) FROM audits a WHERE a.automation_run_id = t.run_id AND a.fiche_id = t.fiche_id)""",
    ),
    Erasure(
        "transcription runs",
        "transcription_runs",
        f"{FICHE} AND (t.erased_at IS NULL OR t.fiche_cache_id IS NOT NULL)",
        "erased_at = ecluse_now(), fiche_cache_id = NULL",
    ),
    Erasure(
        "summaries of runs",
        "automation_run_facts",
        f"""t.run_id = ANY(%(shared)s) AND t.result_summary::text ~ %(in_words)s AND t.result_summary <> {SUMMARY}""",
        f"result_summary = {SUMMARY}",
    ),
    Erasure("counts of requests", "transcription_requests", FICHE),
    Erasure("audits", "audits", FICHE),
    Erasure(
        "pieces of transcripts",
        "recording_transcription_chunks",
        f"t.recording_id IN (SELECT r.id FROM recordings r WHERE r.fiche_cache_id IN ({IDS}))",  # noqa: S608 - our own
    ),
    Erasure("recordings and transcripts", "recordings", f"t.fiche_cache_id IN ({IDS})"),
    Erasure("fiche", "fiche_cache", FICHE),
    Erasure(
        "messages of deliveries",
        "deliveries",
        f"t.run_id = ANY(%(deliveries)s) AND (t.message -> 'data') <> {DATA}",
        f"message = t.message || jsonb_build_object('data', {DATA})",
    ),
)

CALLS = """
SELECT r.call_id FROM recordings r JOIN fiche_cache t ON t.id = r.fiche_cache_id
WHERE t.tenant_id = %(tenant)s AND t.fiche_id = %(target)s
UNION
SELECT i.key FROM transcription_runs t JOIN items i ON i.run_id = t.run_id AND i.stage IN ('known', 'recordings')
WHERE t.tenant_id = %(tenant)s AND t.fiche_id = %(target)s
"""
OWN_RUNS = """
SELECT t.run_id FROM transcription_runs t WHERE t.tenant_id = %(tenant)s AND t.fiche_id = %(target)s
UNION
SELECT r.id FROM audits t JOIN runs r ON r.id = t.run_id AND r.flow = 'audit'
WHERE t.tenant_id = %(tenant)s AND t.fiche_id = %(target)s
UNION
SELECT r.id FROM runs r
WHERE r.tenant_id = %(tenant)s AND r.flow = 'audit' AND r.input ->> 'fiche_id' = %(target)s
"""
SHARED_RUNS = """
SELECT r.id FROM runs r JOIN outcomes o ON o.run_id = r.id AND o.target = %(target)s
WHERE r.tenant_id = %(tenant)s AND r.flow = 'automation'
"""
DELIVERIES = """
SELECT d.run_id FROM deliveries d
WHERE d.tenant_id = %(tenant)s AND (d.about_run = ANY(%(runs)s) OR d.message -> 'data' ->> 'fiche_id' = %(target)s
    OR d.about_run = ANY(%(shared)s) AND d.message::text ~ %(in_words)s)
"""
OPEN = "SELECT id FROM runs WHERE id = ANY(%s) AND ended_at IS NULL ORDER BY id"
LOCK_FICHE = "SELECT 1 FROM fiche_cache WHERE tenant_id = %s AND fiche_id = %s FOR UPDATE"
KNOWN = "SELECT 1 FROM fiche_cache WHERE tenant_id = %s AND fiche_id = %s"
IN_FLIGHT = """
SELECT owner FROM leases
WHERE tenant_id = %s AND (key = %s OR starts_with(key, %s)) AND ended_at IS NULL LIMIT 1
"""


@dataclass(frozen=True)
class Found:
    """A fiche and the runs it was part of: `runs` were about it alone, `shared` about other fiches as well,
    `deliveries` sent messages about it; `calls` are the ids of its recordings."""

    tenant: str
    fiche_id: str
    runs: list[int]
    shared: list[int]
    deliveries: list[int]
    calls: list[str]

    @property
    def every_run(self) -> set[int]:
        """The ids of all runs that the fiche was part of."""
        return {*self.runs, *self.shared, *self.deliveries}

    @property
    def given(self) -> dict[str, Any]:
        """The parameters of the statements that erase the fiche."""
        whole = erasure.parameters(self.tenant, "fiche", self.fiche_id, [*self.runs, *self.deliveries], self.shared)
        return {**whole, "deliveries": self.deliveries, "calls": self.calls}


async def find(connection: Connection, tenant: str, fiche_id: str) -> Found:
    """Return a fiche with its runs, deliveries and recordings. Raise NotFound if the tenant has neither the fiche nor a
    run of it."""
    given = {"tenant": tenant, "target": fiche_id}
    runs = sorted(await fetch_column(connection, OWN_RUNS, given))
    shared = sorted(await fetch_column(connection, SHARED_RUNS, given))
    words = erasure.parameters(tenant, "fiche", fiche_id, runs, shared)
    deliveries = sorted(await fetch_column(connection, DELIVERIES, words))
    calls = await fetch_column(connection, CALLS, given)
    if not runs and not shared and await fetch_row(connection, KNOWN, (tenant, fiche_id)) is None:
        raise NotFound(f"There is no fiche {fiche_id} of tenant {tenant}, and no run of it.")
    return Found(tenant, fiche_id, runs, shared, deliveries, calls)


async def foresee(connection: Connection, found: Found) -> Counter[str]:
    """Count the rows that `erase` would delete or change, by kind."""
    return await erasure.count(connection, (*erasure.OF_RUNS, *OF_THE_FICHE), found.given)


async def refuse_open_runs(connection: Connection, found: Found) -> None:
    """Raise Refused (409) if one of the fiche's runs is open; the message names the first few."""
    if open_runs := await fetch_column(connection, OPEN, (sorted(found.every_run),)):
        named = first_few([str(run) for run in open_runs])
        message = (
            f"Fiche {found.fiche_id} is part of open runs ({named}): wait for their end, or `ecluse runs end` them."
        )
        raise Refused(409, "RUN_OPEN", message)


async def erase(connection: Connection, found: Found) -> Counter[str]:
    """Erase the fiche in the caller's transaction; return the number of rows deleted or changed, by kind. Raise Refused
    (409) if one of its runs is open, if a run of it was started since `find`, or if a call about it is in flight. Runs
    are locked before the fiche, as everywhere."""
    tenant, fiche_id = found.tenant, found.fiche_id
    await lock_runs(connection, found.every_run)
    await connection.execute(LOCK_FICHE, (tenant, fiche_id))
    await refuse_open_runs(connection, found)
    locks = (tenant, rules.fiche_lock(fiche_id), rules.recording_lock(fiche_id, ""))
    if (holder := await fetch_value(connection, IN_FLIGHT, locks)) is not None:
        message = f"A call about fiche {fiche_id} is in flight ({holder}): try again in a minute."
        raise Refused(409, "CALL_IN_FLIGHT", message)
    if (await find(connection, tenant, fiche_id)).every_run != found.every_run:
        raise Refused(409, "RUN_OPEN", f"A run of fiche {fiche_id} has just been started: wait for its end.")
    return await erasure.erase(connection, (*erasure.OF_RUNS, *OF_THE_FICHE), found.given)
