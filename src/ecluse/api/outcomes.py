"""`outcomes.csv`: the outcome of every target, streamed page by page; no database connection is held while a client
reads slowly.

The format is RFC 4180, with every cell in quotes. Text that a spreadsheet would take for a formula is prefixed with
an apostrophe (ASVS 1.2.10), also after a semicolon, a tab or a line break, where some programs begin another cell.
"""

from __future__ import annotations

import asyncio
import csv
import io
import re
from collections.abc import AsyncIterator, Iterable, Mapping

from fastapi import Request
from starlette.responses import StreamingResponse

from ecluse.access import door
from ecluse.access.changes import change
from ecluse.access.door import caller_of, needs
from ecluse.access.wire import number, reads_of
from ecluse.db.query import Row
from ecluse.db.reads import Reads
from ecluse.flows.audits.queries import unverified_steps
from ecluse.insight import run_queries

PAGE = 10_000  # large: of an open run each page also queries the expected failures
WRITTEN_AT_ONCE = 500  # rows; in between the event loop is free
READ = "runs.read"
COLUMNS = ("target", "outcome", "error_code", "reason", "effect_may_exist", "will_fail", "unverified_steps")
OF_TARGET = COLUMNS[:5]
SIGNS = "-=+@\uff0d\uff1d\uff0b\uff20"  # the four, and their full-width forms
FORMULA_START = re.compile(rf"\A(?=[{SIGNS}\t\r\n\0])|(?<=[;\t\r\n])(?=[{SIGNS}])")

routes = door.routes("runs")


def cell(value: object) -> str:
    """Return a value as the text of a CSV cell, with an apostrophe before what a spreadsheet would take for a
    formula."""
    text = "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return FORMULA_START.sub("'", text)


def lines(rows: Iterable[Iterable[object]]) -> str:
    """Return the rows as lines of CSV."""
    written = io.StringIO()
    csv.writer(written, quoting=csv.QUOTE_ALL).writerows([cell(value) for value in row] for row in rows)
    return written.getvalue()


@routes.get(
    "/api/runs/{run_id}/outcomes.csv",
    openapi_extra=needs(READ) | {"x-command": {"name": "runs outcomes"}},
    response_class=StreamingResponse,
    responses={200: {"content": {"text/csv": {"example": lines([COLUMNS, ("SKU-7", "failed", "NOT_FOUND")])}}}},
)
async def outcomes_csv(request: Request, run_id: str) -> StreamingResponse:
    """Download every target with its outcome as CSV. While the run is open, a target may have no outcome yet; if it is
    known to fail, the reason is given. `unverified_steps`: the number of steps of its audits whose quotes no transcript
    has."""
    tenant, wanted, reads = caller_of(request).tenant, number("run", run_id), reads_of(request)
    first = await _page(reads, tenant, wanted, None)  # before the answer begins: an unknown run is a 404
    unverified = await reads(lambda c: unverified_steps(c, tenant, wanted))
    async with change(request, "run.export", f"run:{wanted}"):
        pass  # nothing changes: only the row in the audit trail is stored
    return StreamingResponse(
        _all(request, wanted, first, unverified),
        media_type="text/csv; charset=utf-8; header=present",
        headers={"Content-Disposition": f'attachment; filename="run-{wanted}-outcomes.csv"'},
    )


async def _all(request: Request, run_id: int, page: list[Row], unverified: Mapping[str, int]) -> AsyncIterator[str]:
    reads, tenant = reads_of(request), caller_of(request).tenant
    yield lines([COLUMNS])
    while page:
        for start in range(0, len(page), WRITTEN_AT_ONCE):
            some = page[start : start + WRITTEN_AT_ONCE]
            yield lines(
                [*[row[name] for name in OF_TARGET], _expected(row), unverified.get(row["target"])] for row in some
            )
            await asyncio.sleep(0)  # sending to a quick client does not wait
        await door.admit_rest(request, READ)
        page = await _page(reads, tenant, run_id, page[-1]["target"])


def _expected(row: Row) -> str | None:
    expected = row["will_fail"]
    return None if expected is None else f"{expected['code']}: {expected['reason']}"


async def _page(reads: Reads, tenant: str, run_id: int, after: str | None) -> list[Row]:
    return await reads.to_the_end(lambda c: run_queries.list_outcomes(c, tenant, run_id, after=after, limit=PAGE))
