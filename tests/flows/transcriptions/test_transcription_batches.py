"""A batch of many fiches costs few statements, whatever its size."""

from __future__ import annotations

from collections import Counter

import psycopg
import pytest

from ecluse.engine import pause_lane
from ecluse.flows.transcriptions.surface import MOST
from tests.support.transcription_world import NONE, until

FICHES, EACH = 100, 5


@pytest.fixture
def statements(monkeypatch):
    """Every statement that this process sends, by how it begins."""
    sent: Counter[str] = Counter()
    execute = psycopg.AsyncCursor.execute

    async def counted(cursor, query, *arguments, **options):
        sent[" ".join(str(query).split())[:90]] += 1
        return await execute(cursor, query, *arguments, **options)

    monkeypatch.setattr(psycopg.AsyncCursor, "execute", counted)
    return sent


# Asked by the clock or by idle hands, not by what is done; and whether a connection lives.
BY_THE_CLOCK = (
    "WITH RECURSIVE clock",
    "SELECT id FROM lanes",
    "SELECT i.suspicion, count(*)",
    "SELECT id, tenant_id, event_key, event_type",
    "WITH marked",
    "SELECT id FROM runs WHERE id = ANY(%s) AND ended_at",
)


@pytest.mark.req("G-82", "TRX-09")
async def test_what_a_batch_costs_hangs_on_its_commits_and_not_on_its_recordings(world, statements, query):
    w = await world(fiche_concurrency=100, recording_concurrency=200)
    fiches = [str(n) for n in range(1004, 1004 + 8 * FICHES, 8)]  # of five recordings each
    statements.clear()
    started = await w.start(*fiches)
    assert statements.total() < 80, "however many fiches"
    assert len({one.run_id for one in started}) == FICHES
    await until(lambda: query("SELECT count(*) FROM runs WHERE ended_at IS NOT NULL") == [(FICHES,)], 110)
    assert query("SELECT DISTINCT status, selected, successful FROM runs") == [("completed", EACH, EACH)]
    assert len(w.paid()) == FICHES * EACH
    spent = sum(count for text, count in statements.items() if text and not text.startswith(BY_THE_CLOCK))
    commits = sum(count for text, count in statements.items() if text.startswith("WITH inp AS MATERIALIZED"))
    assert commits < FICHES
    assert spent <= 45 * commits, statements.most_common(20)


@pytest.mark.req("TRX-09")
async def test_the_largest_batch_is_started_in_one_transaction(world, query):
    w = await world()
    async with w.kit.pool.connection() as connection:
        await pause_lane(connection, "crm-transcription", reason="a test", by="test")
    fiches = [str(100_000 + n) for n in range(MOST)]
    started = await w.start(*fiches)
    assert [one.fiche_id for one in started] == fiches
    assert query("SELECT count(*) FROM runs WHERE status = 'running'") == [(MOST,)]
    assert query("SELECT count(*) FROM items WHERE stage = 'refresh' AND status = 'open'") == [(MOST,)]


@pytest.mark.req("TRX-58")
async def test_a_fiche_with_nothing_to_do_ends_with_the_commit_of_its_refresh(world, statements):
    w = await world()
    assert (await w.transcribe(NONE))["status"] == "completed"
    assert "SELECT pg_notify(%s, '')" not in statements, "no sweep is asked for"
