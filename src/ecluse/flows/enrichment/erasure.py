"""Erasure of companies: what the registers said of them, in every form, with the requests and jobs about them. Runs and
events keep the SIREN and error codes; they never held more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ecluse.access.envelope import Refused
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_column, fetch_row

OPEN = """
SELECT run_id FROM enrichment_jobs WHERE siren = ANY(%s) AND ended_at IS NULL ORDER BY run_id
"""
ERASE = """
WITH sources AS (
    DELETE FROM enrichment_sources WHERE run_id IN (SELECT run_id FROM enrichment_jobs WHERE siren = ANY(%(sirens)s))),
jobs AS (DELETE FROM enrichment_jobs WHERE siren = ANY(%(sirens)s) RETURNING 1),
snapshots AS (DELETE FROM company_snapshots WHERE siren = ANY(%(sirens)s) RETURNING 1),
asked AS (DELETE FROM requests WHERE company_siren = ANY(%(sirens)s) RETURNING 1),
gone AS (DELETE FROM companies WHERE siren = ANY(%(sirens)s) RETURNING 1)
SELECT (SELECT count(*) FROM gone), (SELECT count(*) FROM snapshots), (SELECT count(*) FROM jobs),
       (SELECT count(*) FROM asked)
"""


class Erased(NamedTuple):
    """The number of removed rows, by kind."""

    companies: int
    snapshots: int
    jobs: int
    requests: int

    def in_words(self) -> str:
        return ", ".join(f"{count} {what}" for what, count in self._asdict().items())


async def erase(connection: Connection, sirens: Sequence[str]) -> Erased:
    """Erase companies in the caller's transaction; return the counts. Raise Refused RUN_OPEN if one has an open job."""
    if found := await fetch_column(connection, OPEN, (list(sirens),)):
        message = f"Job {found[0]} asks the registers for this company: wait for its end, or end its run first."
        raise Refused(409, "RUN_OPEN", message)
    row = await fetch_row(connection, ERASE, {"sirens": list(sirens)})
    assert row is not None  # noqa: S101 - a row of counts
    return Erased(*row)
