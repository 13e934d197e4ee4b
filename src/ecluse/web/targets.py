"""Pages of targets: one target of a run in full, and the runs that selected a target."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel

from ecluse.access.door import caller_of, needs
from ecluse.access.wire import Filter, Offset, number, reads_of
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_all
from ecluse.flows.audits.flow import FLOW as AUDIT
from ecluse.flows.automation.schedules import FLOW as AUTOMATION
from ecluse.flows.transcriptions.rules import FLOW as TRANSCRIPTION
from ecluse.insight import run_queries
from ecluse.insight.causes import BLOCKING
from ecluse.insight.targets import show_target
from ecluse.web import render
from ecluse.web.advice import advice
from ecluse.web.authentication import Page

OF_FICHES = (AUTOMATION, TRANSCRIPTION, AUDIT)  # flows whose targets are fiches
RUNS = 25  # rows on a page
LONGEST = 20_000  # characters of a transcript that are shown

routes = APIRouter(route_class=Page, include_in_schema=False)
MAY = "runs.read"

FOUND = """
SELECT t.run_id, t.target, t.outcome, t.error_code, t.reason, t.flow, t.created_at, r.parent_run_id, r.redrive_of,
       s.name AS schedule
FROM run_targets t JOIN runs r ON r.id = t.run_id LEFT JOIN schedules s ON s.id = t.schedule_id
WHERE t.tenant_id = %(tenant)s AND t.target = %(target)s
ORDER BY t.run_id DESC LIMIT %(limit)s OFFSET %(offset)s
"""
# Items of the runs that were started for the target, each with its attempts; at most 200.
WORK = """
SELECT i.run_id, i.stage, i.key, i.lane, i.status, i.in_flight, i.executions, i.crashes, i.error_code, i.error,
       i.finished_at, coalesce(a.attempts, '{}') AS attempts
FROM run_items i CROSS JOIN LATERAL (SELECT array_agg(to_jsonb(a) ORDER BY a.id) AS attempts
                                     FROM attempts a WHERE a.item_id = i.id) a
WHERE i.run_id = ANY(%(runs)s) ORDER BY i.run_id, i.stage, i.key LIMIT 200
"""
RECORDINGS = """
SELECT r.call_id, r.start_time, r.duration_s, r.recording_url <> '' AS has_url, r.has_transcription, r.transcribed_at,
       r.removed_at, left(r.transcription_text, %(longest)s) AS transcript,
       length(r.transcription_text) > %(longest)s AS cut
FROM recordings r JOIN fiche_cache f ON f.id = r.fiche_cache_id
WHERE f.tenant_id = %(tenant)s AND f.fiche_id = %(target)s ORDER BY r.start_time NULLS LAST, r.call_id
"""
AUDITS = """
SELECT id, audit_config_id, config_name, config_version, status, score, error_code, error, is_latest, run_id,
       automation_run_id = %(run)s IS TRUE AS of_this_run, created_at
FROM audit_list WHERE tenant_id = %(tenant)s AND fiche_id = %(target)s ORDER BY id DESC LIMIT 50
"""


class ListFilters(BaseModel):
    q: Filter = None
    offset: Offset = 0


@routes.get("/ui/targets", openapi_extra=needs(MAY))
async def find(request: Request, filters: Annotated[ListFilters, Query()]) -> Response:
    tenant, target = caller_of(request).tenant, (filters.q or "").strip()

    async def ask(connection: Connection) -> list[Row]:
        given = {"tenant": tenant, "target": target, "limit": RUNS + 1, "offset": filters.offset}
        return await fetch_all(connection, dict, FOUND, given)

    found = await reads_of(request)(ask) if target else []
    more, rows = len(found) > RUNS, found[:RUNS]
    return render.page(request, "targets.html", found=rows, more=more, size=RUNS, wanted=filters, q=target)


@routes.get("/ui/runs/{run_id}/targets/{target:path}", openapi_extra=needs(MAY))
async def show(request: Request, run_id: str, target: str) -> Response:
    tenant, wanted = caller_of(request).tenant, number("run", run_id)

    async def ask(connection: Connection) -> Row:
        run = await run_queries.run_itself(connection, tenant, wanted)
        found = await show_target(connection, tenant, wanted, target)
        given: Row = {"tenant": tenant, "target": target, "run": wanted, "longest": LONGEST}
        given["runs"] = [one["id"] for one in found["runs"]]
        of_fiche = run["flow"] in OF_FICHES
        return {
            "found": found,
            "run": run,
            "work": await fetch_all(connection, dict, WORK, given) if given["runs"] else [],
            "recordings": await fetch_all(connection, dict, RECORDINGS, given) if of_fiche else [],
            "audits": await fetch_all(connection, dict, AUDITS, given) if of_fiche else [],
            "of_fiche": of_fiche,
        }

    shown = await reads_of(request)(ask)
    found = shown["found"]
    code = found["error_code"] or (found["will_fail"] or {}).get("code")
    said = advice(code) if code and found["outcome"] in (None, "failed") else ""
    return render.page(request, "target.html", target=target, advice=said, blocking=BLOCKING, **shown)
