"""The database itself refuses a run that does not add up, whichever program writes it. Pure SQL: no engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from psycopg import IsolationLevel
from psycopg.errors import (
    CheckViolation,
    IntegrityConstraintViolation,
    InvalidTransactionState,
    LockNotAvailable,
    SerializationFailure,
)

OPEN_RUN = """
INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, created_at, selected)
VALUES ('t', 'f', %s, false, 'running', 'running', now(), %s) RETURNING id
"""
END_RUN = """
UPDATE runs SET status = 'completed', state = 'succeeded', ended_at = now(), end_cause = 'normal',
    selected = %s, successful = %s, failed = %s, ignored = %s WHERE id = %s
"""
ADD = "INSERT INTO outcomes (run_id, target, outcome) VALUES (%s, %s, %s)"
TARGETS = {"a": "successful", "b": "successful", "c": "failed", "d": "ignored"}
TRUE = (4, 2, 1, 1)
# How the later of two that contradict each other may be stopped.
LATE = (IntegrityConstraintViolation, LockNotAvailable, SerializationFailure, InvalidTransactionState)


@pytest.fixture(scope="module")
def dsn(databases):
    """One database for the whole file: every test leaves it empty."""
    with databases.one() as dsn:
        yield dsn


@pytest.fixture(autouse=True)
def _emptied(dsn):
    yield
    with psycopg.connect(dsn) as connection:
        connection.execute("ALTER TABLE outcomes DISABLE TRIGGER USER")  # the guards would refuse
        connection.execute("DELETE FROM outcomes; DELETE FROM runs; DELETE FROM items; DELETE FROM claims")
        connection.execute("ALTER TABLE outcomes ENABLE TRIGGER USER")


@pytest.fixture
def connect(dsn, _emptied):
    """Real sessions that do not wait long for each other."""
    opened: list[psycopg.Connection] = []

    def session(isolation: IsolationLevel | None = None) -> psycopg.Connection:
        connection = psycopg.connect(dsn, options="-c lock_timeout=150ms")
        connection.isolation_level = isolation
        opened.append(connection)
        return connection

    yield session
    for connection in opened:
        connection.close()


@pytest.fixture
def run(query, one) -> int:
    """A running run with one outcome per target."""
    run_id = int(one(OPEN_RUN, "key", len(TARGETS)))
    for target, outcome in TARGETS.items():
        query(ADD, run_id, target, outcome)
    return run_id


@pytest.fixture
def conserved(one):
    """What the run says and what its outcomes say; both are asked of the committed state."""

    def look(run_id: int) -> bool:
        said = one("SELECT ended_at IS NOT NULL, selected, successful, failed, ignored FROM runs WHERE id = %s", run_id)
        counted = one(
            "SELECT count(*), count(*) FILTER (WHERE outcome = 'successful'), count(*) FILTER (WHERE outcome ="
            " 'failed'), count(*) FILTER (WHERE outcome = 'ignored') FROM outcomes WHERE run_id = %s",
            run_id,
        )
        return not said[0] or said[1:] == counted

    return look


@pytest.mark.req("ENG-94")
def test_a_run_that_adds_up_may_end(query, one, run):
    query(END_RUN, *TRUE, run)
    assert one("SELECT state, selected, successful, failed, ignored FROM runs") == ("succeeded", *TRUE)


@pytest.mark.req("ENG-94")
@pytest.mark.parametrize(
    ("spoil", "counters"),
    [
        ("DELETE FROM outcomes WHERE target = 'a'", TRUE),
        ("INSERT INTO outcomes SELECT run_id, 'e', 'successful' FROM outcomes LIMIT 1", TRUE),
        ("INSERT INTO outcomes SELECT run_id, 'e', NULL FROM outcomes LIMIT 1", TRUE),
        ("UPDATE outcomes SET outcome = NULL WHERE target = 'a'", TRUE),
        ("UPDATE outcomes SET outcome = NULL WHERE target = 'a'", (4, 1, 1, 1)),
        ("UPDATE outcomes SET outcome = NULL WHERE target = 'a'", (3, 1, 1, 1)),
        ("UPDATE outcomes SET outcome = 'failed' WHERE target = 'a'", TRUE),
        ("DELETE FROM outcomes", TRUE),
        ("SELECT", (4, 1, 2, 1)),
        ("SELECT", (0, 0, 0, 0)),
        ("SELECT", (5, 3, 1, 1)),
        ("SELECT", (None, 2, 1, 1)),
        ("SELECT", (4, None, 1, 1)),
        ("SELECT", (4, 2, 1, 2)),
        ("SELECT", (4, 5, -2, 1)),
    ],
    ids=[
        "one outcome too few",
        "one too many",
        "one too many, open",
        "one open",
        "one open, left out of the sum",
        "one open, left out of the count",
        "another outcome than said",
        "no outcomes",
        "counters swapped",
        "counters at zero",
        "counters too high",
        "selected unknown",
        "a counter unknown",
        "counters that do not sum up",
        "a negative counter",
    ],
)
def test_a_run_that_does_not_add_up_cannot_end(connect, one, conserved, run, spoil, counters):
    session = connect()
    session.execute(spoil)
    with pytest.raises((IntegrityConstraintViolation, CheckViolation)):
        end_and_commit(session, run, counters)
    assert one("SELECT state FROM runs") == "running"
    assert conserved(run)


def end_and_commit(session: psycopg.Connection, run: int, counters=TRUE) -> None:
    session.execute(END_RUN, (*counters, run))
    session.commit()


def test_the_sum_is_checked_at_the_end_of_the_transaction_not_before(connect, one, run):
    """Outcomes and end may be written in either order within one commit."""
    session = connect()
    session.execute("UPDATE outcomes SET outcome = NULL")
    session.execute("UPDATE outcomes SET outcome = 'failed'")
    end_and_commit(session, run, (4, 0, 4, 0))
    assert one("SELECT failed FROM runs") == 4


def test_a_run_cannot_be_inserted_as_ended_with_a_false_sum(connect, one):
    session = connect()
    session.execute(
        "INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, created_at, ended_at, end_cause,"
        " selected, successful, failed, ignored) VALUES ('t', 'f', 'k', false, 'completed', 'succeeded', now(), now(),"
        " 'normal', 1, 1, 0, 0)"
    )
    with pytest.raises(IntegrityConstraintViolation, match="does not add up: 1 = 1"):
        session.commit()
    assert one("SELECT count(*) FROM runs") == 0


def test_the_counters_of_an_ended_run_cannot_be_changed(query, conserved, run):
    query(END_RUN, *TRUE, run)
    with pytest.raises(IntegrityConstraintViolation):
        query("UPDATE runs SET successful = 1, failed = 2")
    query("UPDATE runs SET error_message = 'still allowed'")
    assert conserved(run)


@pytest.mark.req("ENG-94")
@pytest.mark.parametrize(
    "write",
    [
        "INSERT INTO outcomes (run_id, target, outcome) VALUES (%(run)s, 'e', 'failed')",
        "INSERT INTO outcomes VALUES (%(run)s, 'a') ON CONFLICT (run_id, target) DO UPDATE SET outcome = 'failed'",
        "UPDATE outcomes SET outcome = 'failed' WHERE run_id = %(run)s AND target = 'a'",
        "UPDATE outcomes SET reason = 'other' WHERE run_id = %(run)s",
        "DELETE FROM outcomes WHERE run_id = %(run)s AND target = 'a'",
        "UPDATE outcomes SET run_id = %(run)s WHERE run_id = %(other)s",
        "MERGE INTO outcomes o USING (SELECT 1) AS x ON o.run_id = %(run)s WHEN MATCHED THEN DELETE",
    ],
    ids=["insert", "upsert", "update", "update of the reason", "delete", "move into it", "merge"],
)
def test_the_outcomes_of_an_ended_run_are_final(dsn, query, one, conserved, run, write):
    if write.startswith("MERGE") and one("SELECT current_setting('server_version_num')::int") < 150_000:
        pytest.skip("MERGE came with PostgreSQL 15")
    query(END_RUN, *TRUE, run)
    other = one(OPEN_RUN, "other", 1)
    query(ADD, other, "x", "failed")
    before = query("SELECT * FROM outcomes ORDER BY run_id, target")
    refusal = r"final: it has ended|cannot be moved"
    with psycopg.connect(dsn) as session, pytest.raises(IntegrityConstraintViolation, match=refusal):
        session.execute(write, {"run": run, "other": other})
    assert query("SELECT * FROM outcomes ORDER BY run_id, target") == before
    query("UPDATE outcomes SET outcome = 'successful' WHERE run_id = %s", other)
    assert conserved(run)


@pytest.mark.parametrize(
    "write", ["UPDATE outcomes SET run_id = %(other)s WHERE run_id = %(run)s", "TRUNCATE outcomes"]
)
def test_the_outcomes_of_an_ended_run_cannot_be_taken_from_it(dsn, query, one, conserved, run, write):
    query(END_RUN, *TRUE, run)
    other = one(OPEN_RUN, "other", 0)
    with psycopg.connect(dsn) as session, pytest.raises(psycopg.DatabaseError):
        session.execute(write, {"run": run, "other": other})
    assert conserved(run)


LATE_WRITES = {
    "insert": "INSERT INTO outcomes VALUES (%s, 'late', 'failed')",
    "update": "UPDATE outcomes SET outcome = 'failed' WHERE run_id = %s AND target = 'a'",
    "delete": "DELETE FROM outcomes WHERE run_id = %s AND target = 'a'",
}
ISOLATION = [IsolationLevel.READ_COMMITTED, IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE]


@pytest.mark.parametrize("isolation", ISOLATION, ids=lambda level: level.name.lower())
@pytest.mark.parametrize("write", LATE_WRITES.values(), ids=LATE_WRITES)
def test_an_open_writer_holds_up_the_end_of_its_run(connect, one, conserved, run, write, isolation):
    writer, closer = connect(isolation), connect()
    closer.execute("SELECT count(*) FROM outcomes")
    writer.execute(write, (run,))
    with pytest.raises(LATE):
        end_and_commit(closer, run)
    closer.rollback()
    writer.commit()
    assert one("SELECT state FROM runs") == "running"
    with pytest.raises(LATE):
        end_and_commit(closer, run)
    assert conserved(run)


@pytest.mark.parametrize("isolation", ISOLATION, ids=lambda level: level.name.lower())
@pytest.mark.parametrize("write", LATE_WRITES.values(), ids=LATE_WRITES)
def test_an_end_that_is_under_way_holds_up_late_writers(connect, one, conserved, run, write, isolation):
    writer, closer = connect(isolation), connect()
    writer.execute("SELECT count(*) FROM outcomes")
    closer.execute(END_RUN, (*TRUE, run))
    with pytest.raises(LATE):
        writer.execute(write, (run,))
    writer.rollback()
    closer.commit()
    assert one("SELECT state FROM runs") == "succeeded"
    with pytest.raises(IntegrityConstraintViolation):
        writer.execute(write, (run,))
    assert conserved(run)


def test_a_writer_that_waited_for_the_end_is_refused_once_it_has_come(connect, conserved, run):
    """With patience instead of a lock time-out: it looks again after waiting."""
    writer, closer = connect(), connect()
    writer.execute("SET lock_timeout = '10s'")
    closer.execute(END_RUN, (*TRUE, run))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(writer.execute, LATE_WRITES["insert"], (run,))
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.3)
        closer.commit()
        with pytest.raises(IntegrityConstraintViolation, match="final"):
            waiting.result(timeout=10)
    assert conserved(run)


def test_an_end_that_waited_for_a_writer_counts_what_it_wrote(connect, one, conserved, run):
    writer, closer = connect(), connect()
    closer.execute("SET lock_timeout = '10s'")
    writer.execute(LATE_WRITES["insert"], (run,))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(end_and_commit, closer, run)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.3)
        writer.commit()
        with pytest.raises(IntegrityConstraintViolation, match="outcomes 5 = 2"):
            waiting.result(timeout=10)
    closer.rollback()
    end_and_commit(closer, run, (5, 2, 2, 1))
    assert one("SELECT state, failed FROM runs") == ("succeeded", 2)
    assert conserved(run)


@pytest.mark.parametrize(
    "isolation",
    [
        IsolationLevel.READ_COMMITTED,
        IsolationLevel.REPEATABLE_READ,
        IsolationLevel.SERIALIZABLE,
    ],
    ids=lambda level: level.name.lower(),
)
def test_an_end_does_not_overlook_a_writer_that_committed_after_its_snapshot(connect, conserved, run, isolation):
    writer, closer = connect(), connect(isolation)
    closer.execute("SELECT count(*) FROM outcomes")
    writer.execute(LATE_WRITES["insert"], (run,))
    writer.commit()
    with pytest.raises(LATE):
        end_and_commit(closer, run)
    closer.rollback()
    assert conserved(run)


def test_writers_of_one_run_do_not_wait_for_each_other(connect, one, run):
    first, second = connect(), connect()
    first.execute(ADD, (run, "x", "failed"))
    second.execute(ADD, (run, "y", "failed"))
    second.commit()
    first.commit()
    assert one("SELECT count(*) FROM outcomes") == 6


def test_twenty_thousand_outcomes_are_settled_and_ended(connect, one):
    session = connect()
    run_id = one(OPEN_RUN, "large", 20_000)
    session.execute("INSERT INTO outcomes SELECT %s, n::text FROM generate_series(1, 20000) n", (run_id,))
    session.execute("UPDATE outcomes SET outcome = 'successful' WHERE run_id = %s", (run_id,))
    end_and_commit(session, run_id, (20_000, 20_000, 0, 0))
    assert one("SELECT successful FROM runs") == 20_000
    assert one("SELECT count(*) FROM outcomes WHERE outcome = 'successful'") == 20_000


ITEM = "INSERT INTO items (tenant_id, flow, run_id, stage, key, target, lane_id, due_at, status, finished_at) VALUES"
CLAIM = "INSERT INTO claims (replica_id, run_id, stage, lane_id, taken_at, taken, succeeded, failed, ignored, released)"
FAILED = "UPDATE runs SET state = 'failed', ended_at = now(),"
LIES = {
    "runs_end": [
        "UPDATE runs SET state = 'succeeded'",
        "UPDATE runs SET ended_at = now(), end_cause = 'normal', successful = 2, failed = 1, ignored = 1",
    ],
    "runs_end_cause": [
        "UPDATE runs SET end_cause = 'normal'",
        f"{FAILED} successful = 2, failed = 1, ignored = 1",
    ],
    "runs_conservation": [
        f"{FAILED} end_cause = 'stale', selected = NULL",
        f"{FAILED} end_cause = 'stale', successful = 1, failed = 1, ignored = 1",
    ],
    "runs_end_cause_check": [f"{FAILED} end_cause = 'bored', successful = 2, failed = 1, ignored = 1"],
    "runs_state_check": [
        "UPDATE runs SET state = 'done', ended_at = now(), end_cause = 'stale', successful = 2, failed = 1, ignored = 1"
    ],
    "outcomes_outcome_check": ["UPDATE outcomes SET outcome = 'fine'"],
    "items_finished": [
        f"{ITEM} ('t', 'f', 1, 's', 'k', 'k', 1, now(), 'open', now())",
        f"{ITEM} ('t', 'f', 1, 's', 'k', 'k', 1, now(), 'failed', NULL)",
    ],
    "claims_in_flight": [
        f"{CLAIM} VALUES ('r', 1, 's', 1, now(), 3, 1, 1, 1, 1)",
        f"{CLAIM} VALUES ('r', 1, 's', 1, now(), 0, 0, 0, 0, 1)",
    ],
}


@pytest.mark.parametrize(("constraint", "lie"), [(name, lie) for name, lies in LIES.items() for lie in lies])
def test_a_row_that_contradicts_itself_is_refused(query, run, constraint, lie):
    with pytest.raises(CheckViolation) as refused:
        query(lie)
    assert refused.value.diag.constraint_name == constraint


def test_rows_that_do_not_contradict_themselves_are_taken(query, one):
    query(f"{ITEM} ('t', 'f', 1, 's', 'k', 'k', 1, now(), 'open', NULL)")
    query(f"{ITEM} ('t', 'f', 1, 's', 'l', 'l', 1, now(), 'failed', now())")
    query(f"{CLAIM} VALUES ('r', 1, 's', 1, now(), 4, 1, 1, 1, 1), ('r', 1, 's', 1, now(), 4, 1, 0, 0, 0)")
    assert query("SELECT in_flight FROM claims ORDER BY id") == [(0,), (3,)]
    assert one("SELECT count(*) FROM items") == 2
