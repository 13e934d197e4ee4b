"""Selection of a run's fiches: the fiches that the selection names, or those sold on its days, after the CRM was asked
for the sales lists of these days again. Filters that need a fiche's details are applied later (`eligibility`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import date
from typing import Any, NamedTuple

from ecluse.base.errors import NonRetriableError
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_all, fetch_row, fetch_rows
from ecluse.engine import NewItem, Run, Stage, keep_open, note_errors, select_targets
from ecluse.flows.automation import events, snapshot
from ecluse.flows.automation.selection_model import Selection, crm_date, dates_to_query
from ecluse.flows.automation.snapshot import Snapshot

REVALIDATE = "revalidate"
AT_ONCE = 3  # days of one run that are requested from the CRM at the same time
NAMED = 10  # days, in a sentence

# A list of the CRM may lack sales: fiches cached before stay in the cache, and are selected, too.
LISTED = """
SELECT f.fiche_id, f.groupe, EXISTS (
    SELECT 1 FROM audits a WHERE a.fiche_cache_id = f.id AND a.is_latest) AS audited
FROM fiche_cache f WHERE f.tenant_id = %s AND f.sales_date BETWEEN %s AND %s AND f.sales_date = ANY(%s)
ORDER BY f.sales_date, f.id
"""
# Days still in flight are included: the time of their stage is up.
FAILED_DAYS = """
SELECT i.key, i.error_code, i.error, a.http_status FROM items i LEFT JOIN LATERAL (
    SELECT http_status FROM attempts WHERE item_id = i.id ORDER BY id DESC LIMIT 1) a ON true
WHERE i.run_id = %s AND i.stage = %s AND i.status <> 'succeeded' ORDER BY i.key
"""
SELECTED = """
SELECT selected, error_details ->> 'selection_incomplete' FROM runs WHERE id = %s AND selected IS NOT NULL
"""
WHY_NONE = """
UPDATE automation_run_facts
SET result_summary = coalesce(result_summary, '{}') || jsonb_build_object('reason', %s::text) WHERE run_id = %s
"""


class CrmUnavailable(NonRetriableError):
    """The CRM did not list the days that the run is about, and no fiche of them is cached."""

    code = "CRM_UNAVAILABLE"


class Listed(NamedTuple):
    """A fiche that may be selected, with its groupe if it is known; `audited`: an audit of it has ended."""

    fiche_id: str
    groupe: str | None
    audited: bool


class Picked(NamedTuple):
    """The selected fiches, and the number of dropped ones by reason (`audited`, `groupe`, `max_fiches`)."""

    fiche_ids: list[str]
    dropped: dict[str, int]


def pick(found: Iterable[Listed], selection: Selection) -> Picked:
    """Apply the selection's filters and its `max_fiches` to the found fiches, in their order. A fiche without a known
    groupe is kept: it is judged once its details are known."""
    dropped: Counter[str] = Counter()
    kept: dict[str, None] = {}
    for one in found:
        if selection.only_unaudited and one.audited:
            dropped["audited"] += 1
        elif selection.groupes and one.groupe is not None and one.groupe not in selection.groupes:
            dropped["groupe"] += 1
        else:
            kept[one.fiche_id] = None
    ids = list(kept)
    most = selection.max_fiches or len(ids)
    if len(ids) > most:
        dropped["max_fiches"] += len(ids) - most
    return Picked(ids[:most], dict(dropped))


def why_none(selection: Selection, dates: Sequence[date]) -> str:
    """Return the reason code for a selection that found no fiche."""
    if selection.mode == "manual":
        return "no_fiches_manual"
    return "no_fiches" if dates else "no_dates"


def missing_days_message(days: Sequence[str], asked: int, why: str, any_picked: bool) -> str:
    """Return a message about the `days` that the CRM refused or did not list in time. `asked`: the number of requested
    days; `why`: the error of the first of `days`; `any_picked`: fiches were selected nevertheless."""
    named = ", ".join(days[:NAMED]) + (f" and {len(days) - NAMED} more" if len(days) > NAMED else "")
    missing = f"the CRM did not list {len(days)} of {asked} day{'s' if asked > 1 else ''} ({named}): {why}"
    if any_picked:
        return f"The selection is incomplete, of these days it has only fiches known before: {missing}"
    return f"No fiche was selected: {missing}"


def days_of(wanted: Snapshot) -> list[date]:
    """Return the days that a run's selection covers; none for a manual list."""
    return dates_to_query(wanted.selection, wanted.due, wanted.timezone)


async def days(stage: Stage, connection: Connection, run: Run) -> list[NewItem]:
    """Return an item of this stage for each day to request from the CRM, and log the days. The items are not targets,
    and need not succeed."""
    wanted = await snapshot.load(connection, run)
    dates = days_of(wanted)
    await events.log_line(
        connection, run, f"Calculated {len(dates)} dates to query", dates=[crm_date(d) for d in dates]
    )
    message = f"Revalidating fiche cache for {len(dates)} date(s) before automation"
    await events.log_line(connection, run, message)
    lane = await wanted.crm_lane(connection, stage, run)
    return [NewItem(day.isoformat(), "", wanted.own_key, f"run-{run.id}", lane) for day in dates]


async def select(connection: Connection, run: Run) -> int:
    """Select the run's targets once and return their number; a replay keeps the first selection. Raise CrmUnavailable
    if no fiche was found and the CRM did not list all days: whether there are any is then unknown."""
    async with connection.transaction():
        await keep_open(connection, run)  # lock the run first, as the transaction that ends it does
        if await fetch_row(connection, SELECTED, (run.id,)) is None:
            await _select(connection, run)
    ((count, incomplete),) = await fetch_rows(connection, SELECTED, (run.id,))
    if not count and incomplete:
        raise CrmUnavailable(incomplete)
    return int(count)


async def _select(connection: Connection, run: Run) -> None:
    """Select the targets, store and log their number, and write the event about them."""
    wanted = await snapshot.load(connection, run)
    manual = wanted.selection.mode == "manual"
    picked = await (_named if manual else _sold)(connection, run, wanted)
    ids, asked = picked.fiche_ids, days_of(wanted)
    refused = await _refused(connection, run, len(asked), bool(ids))
    await events.log_line(connection, run, f"Final: {len(ids)} fiches to process", dropped=picked.dropped)
    await snapshot.add_summary(connection, run, selection={"picked": len(ids), "dropped": picked.dropped})
    if not ids and not refused:
        await connection.execute(WHY_NONE, (why_none(wanted.selection, asked), run.id))
    await select_targets(connection, {run.id: [NewItem(fiche_id) for fiche_id in ids]})
    controls = wanted.selection.model_dump(mode="json", exclude={"fiche_ids"})
    await events.selected(connection, run, ids, controls, refused)


async def _named(connection: Connection, run: Run, wanted: Snapshot) -> Picked:
    """Return the fiches that the selection names, up to its `max_fiches`, and log their number."""
    await events.log_line(connection, run, "Processing manual fiche selection")
    picked = pick((Listed(one, None, False) for one in wanted.selection.fiche_ids), wanted.selection)
    await events.log_line(connection, run, f"Using {len(picked.fiche_ids)} manually selected fiches")
    return picked


async def _sold(connection: Connection, run: Run, wanted: Snapshot) -> Picked:
    """Return the cached fiches sold on the selection's days that pass its filters, and log how many were found before
    filtering."""
    dates = days_of(wanted)
    found: Sequence[Listed] = ()
    if dates:
        found = await fetch_all(connection, Listed, LISTED, (run.tenant_id, min(dates), max(dates), dates))
    await events.log_line(connection, run, f"Loaded {len(found)} fiches from DB")
    return pick(found, wanted.selection)


async def _refused(connection: Connection, run: Run, asked: int, any_picked: bool) -> list[str]:
    """Return the days that the CRM did not list, and record them with the run and in its log: fiches of these days may
    be missing. `asked`: the number of requested days; `any_picked`: fiches were selected nevertheless."""
    rows = await fetch_rows(connection, FAILED_DAYS, (run.id, REVALIDATE))
    if not rows:
        return []
    days = [day for day, *_ in rows]
    failed: list[dict[str, Any]] = [
        {"date": crm_date(date.fromisoformat(day)), "code": code, "status": status, "error": error}
        for day, code, error, status in rows
    ]
    message = missing_days_message(days, asked, failed[0]["error"] or "not in time", any_picked)
    await events.log_line(connection, run, message, "warning" if any_picked else "error", apiErrors=failed)
    await note_errors(connection, run, {"apiErrors": failed, "missing_days": days, "selection_incomplete": message})
    return days
