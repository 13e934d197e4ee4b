"""Transcripts of a fiche as they are passed to the model. Items that start at about the same moment share the queries:
the transcripts, the config versions, and the update that marks their audits as running."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, NamedTuple

from ecluse.db.connect import Connection
from ecluse.db.query import fetch_rows
from ecluse.engine import BatchedQuery, Item
from ecluse.flows.audits.configs import snapshots
from ecluse.flows.audits.steps import Step

REMEMBERED = 1_000  # versions of configs

# A failed audit may be repeated by its run while the run is open. A completed audit is only read (DONE).
BEGIN = """
WITH mine AS MATERIALIZED (
    SELECT a.id FROM audits a JOIN runs r ON r.id = a.run_id
    WHERE a.id = ANY(%s) AND a.status IN ('pending', 'failed') AND r.ended_at IS NULL
    ORDER BY a.fiche_cache_id, a.audit_config_id, a.id FOR NO KEY UPDATE OF a)
UPDATE audits a SET status = 'running', started_at = ecluse_now(), finished_at = NULL, error_code = NULL, error = NULL
FROM mine WHERE a.id = mine.id
"""

DONE = "SELECT id, score FROM audits WHERE id = ANY(%s) AND status = 'completed'"

# Recordings removed upstream are not counted. If a recording has chunks, they are its text, and name the speakers.
TRANSCRIPTS = """
SELECT r.fiche_cache_id, r.call_id, r.start_time, coalesce(c.speakers, ARRAY[NULL]::text[]),
       coalesce(c.texts, ARRAY[r.transcription_text])
FROM recordings r
LEFT JOIN LATERAL (
    SELECT array_agg(speaker ORDER BY position) AS speakers, array_agg(text ORDER BY position) AS texts
    FROM recording_transcription_chunks WHERE recording_id = r.id) c ON true
WHERE r.fiche_cache_id = ANY(%s) AND r.has_transcription AND r.removed_at IS NULL
ORDER BY r.fiche_cache_id, r.start_time NULLS LAST, r.call_id
"""


class ConfigContent(NamedTuple):
    """The content of an audit config version."""

    name: str
    description: str
    system_prompt: str
    model: str | None
    steps: list[Step]


class Recording(NamedTuple):
    """A recording with a transcript: the texts of its turns, and their speakers where they are known."""

    call_id: str
    start_time: datetime | None
    speakers: Sequence[str | None]
    texts: Sequence[str]

    @property
    def text(self) -> str:
        """The turns, joined by blanks. Positions of quotes are counted in this text."""
        return " ".join(self.texts)


class AuditInput(NamedTuple):
    """The input of an audit item: the config's content, the transcripts, and the score if the audit is completed
    already."""

    asked: ConfigContent
    recordings: Sequence[Recording]
    done: Decimal | None  # the score of an audit that is completed, and so paid for, already


class Transcripts(BatchedQuery[AuditInput]):
    """Batches the start of audit items: marks their audits as running, and returns an `AuditInput` per item."""

    def __init__(self) -> None:
        super().__init__(self._look)
        self._versions: OrderedDict[tuple[int, int], ConfigContent] = OrderedDict()

    async def _look(self, connection: Connection, items: Sequence[Item]) -> dict[int, AuditInput]:
        """Mark the audits of these items as running, and return the input of each, by item id. The transcripts of a
        completed audit are not read."""
        await self._learn(connection, {_version(item) for item in items})
        audits = [_audit(item) for item in items]
        await connection.execute(BEGIN, (audits,))
        done: dict[int, Decimal] = dict(await fetch_rows(connection, DONE, (audits,)))
        fiches = sorted({_fiche(item) for item in items if _audit(item) not in done})
        recordings: dict[int, list[Recording]] = {}
        for fiche, *recording in await fetch_rows(connection, TRANSCRIPTS, (fiches,)):
            recordings.setdefault(fiche, []).append(Recording(*recording))
        return {
            item.id: AuditInput(
                self._versions[_version(item)], recordings.get(_fiche(item), ()), done.get(_audit(item))
            )
            for item in items
        }

    async def _learn(self, connection: Connection, wanted: set[tuple[int, int]]) -> None:
        """Load config versions that are not cached yet, and drop the oldest beyond REMEMBERED. Versions never change,
        so cached ones stay valid."""
        while len(self._versions) > REMEMBERED:
            self._versions.popitem(last=False)
        if new := [version for version in wanted if version not in self._versions]:
            for config_id, version, given in await snapshots(connection, new):
                self._versions[config_id, version] = asked(given)


def asked(snapshot: dict[str, Any]) -> ConfigContent:
    """Return the content of a config version from its stored snapshot."""
    steps = [Step.model_validate(step) for step in snapshot["steps"]]
    return ConfigContent(snapshot["name"], snapshot["description"], snapshot["system_prompt"], snapshot["model"], steps)


def _audit(item: Item) -> int:
    return int(item.payload["audit_id"])


def _fiche(item: Item) -> int:
    return int(item.payload["fiche_cache_id"])


def _version(item: Item) -> tuple[int, int]:
    return int(item.payload["audit_config_id"]), int(item.payload["config_version"])
