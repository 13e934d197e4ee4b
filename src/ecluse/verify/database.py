"""Consistency between the tables (I-01, I-02, I-04, I-05, I-11, I-12, I-13).

Every statement returns the violations: a subject, a message, and the keys of the rows that explain it. All are
set-based. The program writes the data that a statement compares in one transaction, so that no snapshot shows half
of it.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any, NamedTuple

import psycopg

from ecluse.verify import attempts, automation, transcriptions
from ecluse.verify.report import About, Report, Violation
from ecluse.verify.retention import remains


class Check(NamedTuple):
    """The statements that find violations of one invariant, and the statement that counts the rows they examine."""

    invariant: str
    counted: str  # SQL that counts the rows checked
    statements: tuple[str, ...]


I_01_CONSERVATION = Check(
    "I-01",
    "SELECT count(*) AS n FROM runs",
    (
        """
        SELECT 'run ' || r.id AS subject, r.id AS run_id, CASE
            WHEN r.selected IS NULL THEN format('no targets selected, but %s outcomes', o.n)
            WHEN r.selected <> coalesce(o.n, 0) THEN format('selected %s but %s outcomes', r.selected, coalesce(o.n, 0))
            WHEN o.open > 0 THEN format('ended with %s targets without an outcome', o.open)
            ELSE format('counts %s successful + %s failed + %s ignored of %s, but outcomes are %s + %s + %s',
                r.successful, r.failed, r.ignored, r.selected,
                coalesce(o.successful, 0), coalesce(o.failed, 0), coalesce(o.ignored, 0)) END AS message
        FROM runs r LEFT JOIN (
            SELECT run_id, count(*) AS n, count(*) FILTER (WHERE outcome IS NULL) AS open,
                   count(*) FILTER (WHERE outcome = 'successful') AS successful,
                   count(*) FILTER (WHERE outcome = 'failed') AS failed,
                   count(*) FILTER (WHERE outcome = 'ignored') AS ignored FROM outcomes GROUP BY 1) o ON o.run_id = r.id
        WHERE (r.selected IS NULL AND o.n > 0) OR r.selected <> coalesce(o.n, 0) OR r.ended_at IS NOT NULL AND (
            o.open > 0 OR (r.successful, r.failed, r.ignored) IS DISTINCT FROM
                (coalesce(o.successful, 0)::int, coalesce(o.failed, 0)::int, coalesce(o.ignored, 0)::int))
        ORDER BY r.id
        """,
        f"""
        SELECT 'run ' || o.run_id AS subject, o.run_id, count(*) || ' outcomes, but the run does not exist' AS message
        FROM outcomes o LEFT JOIN runs r ON r.id = o.run_id WHERE r.id IS NULL AND {remains("o.run_id")}
        GROUP BY o.run_id ORDER BY o.run_id
        """,  # noqa: S608 - the fragment of retention
        """
        SELECT 'run ' || r.id AS subject, r.id AS run_id,
               format('counts %s cancelled targets, but %s outcomes are cancelled', r.cancelled, coalesce(o.n, 0))
                   AS message
        FROM runs r LEFT JOIN (
            SELECT run_id, count(*) AS n FROM outcomes WHERE outcome = 'failed' AND error_code = 'CANCELLED' GROUP BY 1)
            o ON o.run_id = r.id AND r.state = 'cancelled'
        WHERE r.cancelled <> coalesce(o.n, 0) ORDER BY r.id
        """,
        f"""
        SELECT format('run %s target %s', i.run_id, i.target) AS subject, i.run_id, i.target,
               'has items, but was not selected' AS message
        FROM (SELECT DISTINCT run_id, target FROM items WHERE target <> '') i
        LEFT JOIN outcomes o ON o.run_id = i.run_id AND o.target = i.target
        WHERE o.run_id IS NULL AND {remains("i.run_id")} ORDER BY 2, 3
        """,  # noqa: S608 - the fragment of retention
    ),
)

# States that a run is given after its end (reverted, expired …) do not follow from counts: they are accepted here, and
# in the check of a flow's statuses below. A run ended by an operator before the state `cancelled` existed has failed.
I_02_STATUS_IS_A_FUNCTION = Check(
    "I-02",
    "SELECT count(*) AS n FROM runs WHERE ended_at IS NOT NULL",
    (
        """
        SELECT 'run ' || x.id AS subject, x.id AS run_id, format('%s (%s), but %s successful and %s failed, ended %s, '
            'give %s', x.state, x.status, x.successful, x.failed, x.end_cause, x.due) AS message
        FROM (SELECT r.id, r.state, r.status, r.end_cause, coalesce(o.successful, 0) AS successful,
                     coalesce(o.failed, 0) AS failed, CASE
                     WHEN r.end_cause IN ('operator', 'parent') AND r.ended_by IS NOT NULL THEN 'cancelled'
                     WHEN r.end_cause <> 'normal' THEN 'failed'
                     WHEN coalesce(o.failed, 0) = 0 THEN 'succeeded'
                     WHEN o.successful > 0 THEN 'partial' ELSE 'failed' END AS due
              FROM runs r LEFT JOIN (
                  SELECT run_id, count(*) FILTER (WHERE outcome = 'successful') AS successful,
                         count(*) FILTER (WHERE outcome = 'failed') AS failed FROM outcomes GROUP BY 1) o
                  ON o.run_id = r.id
              WHERE r.state IN ('succeeded', 'partial', 'failed', 'cancelled')) x
        WHERE x.state <> x.due ORDER BY x.id
        """,
        """
        SELECT 'flow ' || flow AS subject, max(id) AS run_id, format('status %s stands for %s (runs %s)', status,
            string_agg(DISTINCT state, ' and '), string_agg(DISTINCT id::text, ', ')) AS message
        FROM (SELECT flow, status, state, min(id) AS id FROM runs WHERE state <> 'cancelled' GROUP BY 1, 2, 3) w
        GROUP BY flow, status HAVING count(*) > 1 ORDER BY 1
        """,
    ),
)

# An effect belongs to a round of its item: an earlier round may have been definitely refused, the successful one not.
I_04_NO_FALSE_SUCCESS = Check(
    "I-04",
    "SELECT count(*) AS n FROM outcomes WHERE outcome = 'successful'",
    (
        """
        SELECT format('run %s target %s', o.run_id, o.target) AS subject, o.run_id, o.target,
               format('successful, but item %s/%s is %s', i.stage, i.key, i.status) AS message
        FROM outcomes o JOIN items i ON i.run_id = o.run_id AND i.target = o.target
        WHERE o.outcome = 'successful' AND i.status <> 'succeeded' ORDER BY 2, 3
        """,
        """
        SELECT format('run %s item %s/%s', i.run_id, i.stage, i.key) AS subject, i.run_id, i.id AS item_id,
               format('succeeded, but write %s is %s', e.id, e.state) AS message
        FROM effects e JOIN items i ON i.id = e.item_id AND i.round = e.round
        WHERE i.status = 'succeeded' AND e.state <> 'applied' ORDER BY i.id
        """,
        """
        SELECT format('run %s target %s', o.run_id, o.target) AS subject, o.run_id, o.target,
               format('successful, but write %s (round %s) is %s', e.id, e.round, e.state) AS message
        FROM outcomes o JOIN effects e ON e.run_id = o.run_id AND e.target = o.target
        JOIN items i ON i.id = e.item_id AND i.round > e.round
        WHERE o.outcome = 'successful' AND e.state IN ('sending', 'unknown') ORDER BY 2, 3
        """,
        transcriptions.NO_TRANSCRIPT,
        automation.NO_TRANSCRIPT,
        automation.UNAUDITED,
    ),
)

# A failed outcome must warn if, when the run ended, one of its writes had been applied or was in doubt, which
# `settled_at` shows. For a write settled while the run was being ended (slow with many targets), a warning is optional.
# A write that turned out not to have been sent goes back to planned, and the instant of that is not recorded.
I_05_NO_FALSE_FAILURE = Check(
    "I-05",
    "SELECT count(*) AS n FROM outcomes WHERE outcome = 'failed'",
    (
        """
        WITH sent AS (
            SELECT e.run_id, e.target, bool_or(e.state = 'applied' OR e.state <> 'planned'
                       AND (e.settled_at IS NULL OR e.settled_at > r.ended_at)) AS must_warn,
                   bool_or(e.state = 'applied' OR e.settled_at IS NULL OR e.settled_at >
                       r.ended_at - interval '1 second' - r.selected * interval '0.1 ms') AS may_warn
            FROM effects e JOIN runs r ON r.id = e.run_id WHERE r.ended_at IS NOT NULL AND e.sends > 0 GROUP BY 1, 2)
        SELECT format('run %s target %s', o.run_id, o.target) AS subject, o.run_id, o.target, CASE
            WHEN NOT o.effect_may_exist THEN 'failed without effect_may_exist, but a write was applied or in doubt'
            WHEN o.outcome IS DISTINCT FROM 'failed' THEN
                format('has effect_may_exist, but is %s', coalesce(o.outcome, 'open'))
            ELSE 'has effect_may_exist, but no write was applied or in doubt' END AS message
        FROM outcomes o JOIN runs r ON r.id = o.run_id LEFT JOIN sent s ON s.run_id = o.run_id AND s.target = o.target
        WHERE r.ended_at IS NOT NULL AND (o.outcome = 'failed' AND NOT o.effect_may_exist AND s.must_warn
            OR o.effect_may_exist AND (o.outcome IS DISTINCT FROM 'failed' OR s.may_warn IS NOT TRUE))
        ORDER BY 2, 3
        """,
    ),
)

# An open stage may be in fan-out: there may be more items than `expected`, never fewer. If every claim counts its own
# items, all of its own stage, and no item is finished without a claim, the sums per stage are right, too.
I_12_COUNTERS = Check(
    "I-12",
    "SELECT (SELECT count(*) FROM stages) + (SELECT count(*) FROM claims) AS n",
    (
        f"""
        SELECT format('run %s stage %s', coalesce(s.run_id, i.run_id), coalesce(s.stage, i.stage)) AS subject,
               coalesce(s.run_id, i.run_id) AS run_id, CASE
            WHEN s.run_id IS NULL THEN i.n || ' items, but the stage does not exist'
            ELSE format('expects %s items, but there are %s', s.expected, coalesce(i.n, 0)) END AS message
        FROM stages s FULL JOIN (
            SELECT run_id, stage, count(*) AS n FROM items i WHERE {remains("i.run_id")} GROUP BY 1, 2) i
          ON i.run_id = s.run_id AND i.stage = s.stage
        WHERE s.run_id IS NULL OR s.fanned_out_at IS NOT NULL AND (
            s.expected > coalesce(i.n, 0) OR s.expected <> coalesce(i.n, 0) AND s.ended_at IS NOT NULL) ORDER BY 2, 1
        """,  # noqa: S608 - the fragment of retention
        f"""
        SELECT 'claim ' || coalesce(c.id, i.claim_id) AS subject, coalesce(c.run_id, i.run_id) AS run_id, CASE
            WHEN c.id IS NULL THEN i.n || ' items refer to it, but the claim does not exist'
            ELSE format('counts %s in flight, %s succeeded, %s failed, %s ignored, but items are %s, %s, %s, %s',
                c.in_flight, c.succeeded, c.failed, c.ignored,
                coalesce(i.open, 0), coalesce(i.succeeded, 0), coalesce(i.failed, 0), coalesce(i.ignored, 0)) END
            AS message
        FROM claims c FULL JOIN (
            SELECT claim_id, min(run_id) AS run_id, count(*) AS n, count(*) FILTER (WHERE status = 'open') AS open,
                   count(*) FILTER (WHERE status = 'succeeded') AS succeeded,
                   count(*) FILTER (WHERE status = 'failed') AS failed,
                   count(*) FILTER (WHERE status = 'ignored') AS ignored
            FROM items WHERE claim_id IS NOT NULL GROUP BY 1) i ON i.claim_id = c.id
        WHERE (c.id IS NULL OR (c.in_flight, c.succeeded, c.failed, c.ignored) <> (coalesce(i.open, 0),
            coalesce(i.succeeded, 0), coalesce(i.failed, 0), coalesce(i.ignored, 0)))
          AND {remains("coalesce(c.run_id, i.run_id)")} ORDER BY coalesce(c.id, i.claim_id)
        """,  # noqa: S608 - the fragment of retention
        """
        SELECT format('run %s item %s/%s', i.run_id, i.stage, i.key) AS subject, i.run_id, i.id AS item_id, CASE
            WHEN i.claim_id IS NULL THEN i.status || ', but has no claim'
            ELSE format('claim %s belongs to run %s stage %s', c.id, c.run_id, c.stage) END AS message
        FROM items i LEFT JOIN claims c ON c.id = i.claim_id
        WHERE i.claim_id IS NULL AND i.status <> 'open' OR (c.run_id, c.stage) <> (i.run_id, i.stage) ORDER BY i.id
        """,
        transcriptions.SUMMARY,
        automation.SUMMARY,
        automation.STATISTICS,
    ),
)

I_13_ATTEMPTS = Check("I-13", "SELECT count(*) AS n FROM items WHERE executions > 0", attempts.STATEMENTS)

CHECKS = (
    I_01_CONSERVATION,
    I_02_STATUS_IS_A_FUNCTION,
    I_04_NO_FALSE_SUCCESS,
    I_05_NO_FALSE_FAILURE,
    I_12_COUNTERS,
    I_13_ATTEMPTS,
)

# The default statuses, of a flow without its own: the state of each, and the statuses a run may move to from it.
PLAIN = {
    "queued": ("queued", {"running", "failed"}),
    "running": ("running", {"completed", "partial", "failed"}),
    "completed": ("succeeded", set()),
    "partial": ("partial", set()),
    "failed": ("failed", set()),
}
INITIAL = "queued"

RUNS = "SELECT id, flow, status, state, successful FROM runs ORDER BY id"
# Only lines written by status changes: failures of items, which may quote any text, have an event id.
MOVES = """
SELECT run_id, split_part(message, ' -> ', 1) AS from_status, split_part(message, ' -> ', 2) AS to_status
FROM run_log WHERE event_id IS NULL AND message ~ '^[^:>]{1,40} -> [^:>]{1,40}$' ORDER BY run_id, id
"""


def check(connection: psycopg.Connection[dict[str, Any]], report: Report) -> None:
    """Run all checks of this module, and add the violations and the numbers of checked rows to the report."""
    for table in ("runs", "items", "effects"):
        report.checked[table] = count(connection, f"SELECT count(*) AS n FROM {table}")  # noqa: S608 - three lines up
    for one in CHECKS:
        run(connection, one, report)
    _statuses_and_moves(connection, report)


def run(connection: psycopg.Connection[dict[str, Any]], one: Check, report: Report) -> None:
    """Run one check, and add its violations and the number of checked rows to the report."""
    report.checked[one.invariant] = count(connection, one.counted)
    for statement in one.statements:
        for row in connection.execute(statement):
            subject, message = row.pop("subject"), row.pop("message")
            report.violations.append(Violation(one.invariant, subject, message, about=About(**row)))


def count(connection: psycopg.Connection[dict[str, Any]], statement: str) -> int:
    """Return the number that a counting statement returns: the sum of its column `n`."""
    return sum(row["n"] for row in connection.execute(statement))


def _statuses_and_moves(connection: psycopg.Connection[dict[str, Any]], report: Report) -> None:
    """Check the statuses of runs against their states (I-02) and their recorded moves (I-11)."""
    moves = connection.execute(MOVES).fetchall()
    chains = {
        run_id: [(move["from_status"], move["to_status"]) for move in chain]
        for run_id, chain in groupby(moves, key=lambda move: move["run_id"])
    }
    report.checked["I-11"] = len(moves)
    runs = connection.execute(RUNS).fetchall()
    statuses: dict[str, set[str]] = {}
    for row in runs:
        statuses.setdefault(row["flow"], set()).update((row["status"],), *chains.get(row["id"], []))
    # A flow with its own statuses may use the same names and begin with another one: only flows seen in `queued` count.
    plain = {flow for flow, seen in statuses.items() if seen <= set(PLAIN) and INITIAL in seen}
    for row in runs:
        i_02_status(row, report, plain=row["flow"] in plain)
        i_11_transitions(row, chains.get(row["id"], []), report, plain=row["flow"] in plain)


def i_02_status(row: dict[str, Any], report: Report, *, plain: bool) -> None:
    """Check that the run's status matches its state. Only possible if the flow has the default statuses (`plain`): the
    meaning of other statuses is not known here."""
    if plain and row["state"] == "cancelled":
        wrong = row["status"] != ("partial" if row["successful"] else "failed")
    else:
        wrong = plain and PLAIN[row["status"]][0] != row["state"]
    if wrong:
        message = f"status {row['status']} does not match state {row['state']}"
        report.violations.append(Violation("I-02", f"run {row['id']}", message, about=About(run_id=row["id"])))


def i_11_transitions(row: dict[str, Any], chain: list[tuple[str, str]], report: Report, *, plain: bool) -> None:
    """Check that the recorded status changes (`chain`) lead without a gap to the current status. Which changes are
    allowed is known only for the default statuses (`plain`)."""
    at = INITIAL if plain else chain[0][0] if chain else row["status"]
    wrong = []
    for before, after in chain:
        if before != at:
            wrong.append(f"moved from {before} to {after} when it was {at}")
        elif plain and after not in PLAIN[before][1]:
            wrong.append(f"moved from {before} to {after}, which is not allowed")
        at = after
    if at != row["status"]:
        wrong.append(f"the last recorded status is {at}, but it is {row['status']}")
    about = About(run_id=row["id"])
    report.violations += [Violation("I-11", f"run {row['id']}", message, about=about) for message in wrong]
