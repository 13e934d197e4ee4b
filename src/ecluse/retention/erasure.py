"""Erasure of personal data, and deletion of tenants. The bare facts of a run stay: ids, counts, outcomes and their
codes, instants.

`runs` are about the erased record alone and lose all their text; `shared` are runs of which it is one target and lose
the text about that target. The deletion of a whole tenant leaves nothing but its audit trail.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ecluse.base.errors import EcluseError
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_rows, fetch_value
from ecluse.engine.model.flow import Flow
from ecluse.retention import sweep
from ecluse.retention.families import Limits
from ecluse.retention.pace import Pace

ERASED = "[erased]"


@dataclass(frozen=True)
class Erasure:
    """Content to be erased from one table: `where` is a condition on its rows `t`; `changes` is the SET clause that
    removes the content, without it the rows are deleted. Parameters: see `parameters`."""

    what: str  # label of the content, in reports to people
    table: str
    where: str
    changes: str = ""

    @property
    def count(self) -> str:
        """The statement that counts the rows."""
        return f"SELECT count(*) FROM {self.table} t WHERE {self.where}"  # noqa: S608 - our own words

    @property
    def statement(self) -> str:
        """The statement that erases the content."""
        if self.changes:
            return f"UPDATE {self.table} t SET {self.changes} WHERE {self.where}"  # noqa: S608 - our own words
        return f"DELETE FROM {self.table} t WHERE {self.where}"  # noqa: S608 - our own words


# The auditor follows the status changes of a run through its log: these lines stay, without their data.
MOVE = "(t.event_id IS NULL AND t.message ~ '^[^:>]{1,40} -> [^:>]{1,40}$')"
ITEM = "(t.run_id = ANY(%(runs)s) OR t.run_id = ANY(%(shared)s) AND %(target)s IN (t.target, t.key))"
# Lines about the target: they have the computed id of its work, its id in a field, or its name in the text.
NAMED = "(t.{event_id} ~ %(in_id)s OR t.data ->> %(field)s = %(target)s OR t.message ~ %(in_words)s)"
WORDS = """(SELECT coalesce(jsonb_object_agg(e.key, e.value), '{{}}') FROM jsonb_each({payload}) e
    WHERE jsonb_typeof(e.value) IN ('number', 'boolean', 'null') OR e.key = ANY(%(facts)s))"""
# Examples in a log line of a shared run, as `<target>: <why>`; examples about other targets stay.
SAMPLE = """jsonb_array_elements_text(
    CASE jsonb_typeof(t.data -> 'sample') WHEN 'array' THEN t.data -> 'sample' ELSE '[]' END)"""
IN_SAMPLE = f"(starts_with(e.example, %(target)s || ': ') AND e.example <> %(target)s || ': {ERASED}')"
# Fields of an event that stay although they are strings or objects: they hold facts, not text.
FACTS = (
    "run_id", "job_id", "schedule_id", "status", "end_cause", "error_code", "priority", "counts", "due_at",
)  # fmt: skip

OF_RUNS = (
    Erasure(
        "errors of runs",
        "runs",
        f"""(t.id = ANY(%(runs)s) OR t.id = ANY(%(shared)s) AND (t.error_message ~ %(in_words)s OR
            t.reason ~ %(in_words)s OR t.error_details::text ~ %(in_words)s))
        AND (t.error_message <> '{ERASED}' OR t.reason <> '{ERASED}' OR t.error_details IS NOT NULL)""",
        f"error_details = NULL, error_message = CASE WHEN t.error_message IS NOT NULL THEN '{ERASED}' END,"
        f" reason = CASE WHEN t.reason IS NOT NULL THEN '{ERASED}' END",
    ),
    Erasure(
        "payloads, results and errors of items",
        "items",
        f"{ITEM} AND (num_nonnulls(t.payload, t.result, t.postponed_why) > 0 OR t.error <> '{ERASED}')",
        "payload = NULL, result = NULL, postponed_cause = NULL, postponed_why = NULL,"
        f" error = CASE WHEN t.error IS NOT NULL THEN '{ERASED}' END",
    ),
    Erasure(
        "errors of attempts",
        "attempts",
        f"""(t.run_id = ANY(%(runs)s) OR t.run_id = ANY(%(shared)s) AND t.event_id ~ %(in_id)s)
        AND t.error <> '{ERASED}'""",
        f"error = '{ERASED}'",
    ),
    Erasure(
        "reasons of outcomes",
        "outcomes",
        f"""(t.run_id = ANY(%(runs)s) OR t.run_id = ANY(%(shared)s) AND t.target = %(target)s)
        AND t.reason <> '{ERASED}'""",
        f"reason = '{ERASED}'",
    ),
    Erasure(
        "log lines of runs",
        "run_log",
        f"""(t.run_id = ANY(%(runs)s) OR t.run_id = ANY(%(shared)s) AND t.count = 1
            AND ({NAMED.format(event_id="event_id")} OR %(target)s = ANY(t.targets))) AND NOT {MOVE}""",
    ),
    # A line about many targets stays, without this one.
    Erasure(
        "log lines of runs",
        "run_log",
        f"""t.run_id = ANY(%(shared)s) AND t.count > 1 AND t.message <> '{ERASED}'
        AND ({NAMED.format(event_id="event_id")} OR %(target)s = ANY(t.targets))""",
        f"""targets = array_remove(t.targets, %(target)s),
        event_id = CASE WHEN t.event_id ~ %(in_id)s THEN NULL ELSE t.event_id END,
        data = CASE WHEN t.data ->> %(field)s = %(target)s THEN NULL ELSE t.data END,
        message = CASE WHEN t.message ~ %(in_words)s THEN '{ERASED}' ELSE t.message END""",
    ),
    Erasure(
        "log lines of runs",
        "run_log",
        f"t.run_id = ANY(%(shared)s) AND EXISTS (SELECT 1 FROM {SAMPLE} AS e(example) WHERE {IN_SAMPLE})",  # noqa: S608
        f"""data = t.data || jsonb_build_object('sample', (
            SELECT jsonb_agg(CASE WHEN {IN_SAMPLE} THEN %(target)s || ': {ERASED}' ELSE e.example END ORDER BY e.n)
            FROM {SAMPLE} WITH ORDINALITY AS e(example, n)))""",  # noqa: S608 - our own words
    ),
    Erasure(
        "log lines of runs",
        "run_log",
        f"""t.run_id = ANY(%(shared)s) AND t.data::text ~ %(in_words)s
        AND t.data <> {WORDS.format(payload="t.data")}""",
        f"data = {WORDS.format(payload='t.data')}",
    ),
    Erasure(
        "log lines of runs", "run_log", f"t.run_id = ANY(%(runs)s) AND t.data IS NOT NULL AND {MOVE}", "data = NULL"
    ),
    Erasure(
        "trace rows",
        "workflow_logs",
        f"""t.run_id = ANY(%(runs)s)
        OR t.tenant_id = %(tenant)s AND t.entity_type = %(kind)s AND t.entity_id = %(target)s
        OR t.run_id = ANY(%(shared)s) AND {NAMED.format(event_id="inngest_event_id")}""",
    ),
    Erasure(
        "words of events",
        "events_outbox",
        f"""t.tenant_id = %(tenant)s AND (t.aggregate = ANY(%(aggregates)s)
            OR t.aggregate = ANY(%(shared_aggregates)s)
                AND (t.payload ->> %(field)s = %(target)s OR t.payload::text ~ %(in_words)s))
        AND t.payload <> {WORDS.format(payload="t.payload")}""",
        f"payload = {WORDS.format(payload='t.payload')}",
    ),
    Erasure(
        "last failures of lanes",
        "lanes",
        f"t.last_failure ~ %(in_words)s AND t.last_failure <> '{ERASED}'",
        f"last_failure = '{ERASED}'",
    ),
)


def parameters(tenant: str, kind: str, target: str, runs: Sequence[int], shared: Sequence[int]) -> dict[str, Any]:
    """Return the parameters of the statements that erase the record `target` of a tenant. `kind` is the name of such a
    record in logs and events (fiche); `runs` are about this record alone, in `shared` runs it is one of several
    targets."""
    name = re.escape(target)
    return {
        "tenant": tenant,
        "kind": kind,
        "field": f"{kind}_id",
        "target": target,
        "runs": list(runs),
        "shared": list(shared),
        "aggregates": [f"run:{run}" for run in runs],
        "shared_aggregates": [f"run:{run}" for run in shared],
        "in_id": f"-{name}(-|$)",
        "in_words": f"{kind}[ _:#-]*{name}(?![[:alnum:]_])",
        "facts": [*FACTS, f"{kind}_id"],
    }


async def count(connection: Connection, erasures: Sequence[Erasure], given: Mapping[str, Any]) -> Counter[str]:
    """Count the rows that have content to erase, by the label of the content; `given` is the result of `parameters`."""
    found: Counter[str] = Counter()
    for one in erasures:
        found[one.what] += await fetch_value(connection, one.count, given)
    return found


async def erase(connection: Connection, erasures: Sequence[Erasure], given: Mapping[str, Any]) -> Counter[str]:
    """Erase the content in the caller's transaction; return the number of changed and deleted rows by the label of the
    content. `given` is the result of `parameters`."""
    done: Counter[str] = Counter()
    await connection.execute("SET LOCAL ecluse.erasing = 'on'")  # see outcomes_guard()
    for one in erasures:
        done[one.what] += (await connection.execute(one.statement, given)).rowcount  # type: ignore[arg-type, unused-ignore]
    return done


class Stuck(EcluseError):
    """A tenant cannot be deleted: some of its runs are open, or locked by another session. The message says which, and
    names a run."""

    code = "RUNS_LOCKED"


RUNS_OF_TENANT = "SELECT id, ended_at IS NULL FROM runs WHERE tenant_id = %s ORDER BY id DESC LIMIT %s"
BATCH = "DELETE FROM {table} WHERE ctid = ANY(ARRAY(SELECT t.ctid FROM {table} t WHERE {where} LIMIT %(limit)s))"


async def delete_tenant(
    connection: Connection,
    flows: Mapping[str, Flow],
    tenant: str,
    tables: Sequence[Erasure],
    pace: Pace,
) -> Counter[str]:
    """Delete all ended runs of a tenant, whatever their age and whatever still needs them, then the rows of `tables`,
    in batches. Return the number of deleted rows by table. After a crash the next call continues. Raise Stuck if runs
    are open or locked, Busy (`retention.pace`) if a batch takes too long."""
    done: Counter[str] = Counter()
    own = sweep.own_tables(flows)
    while found := await fetch_rows(connection, RUNS_OF_TENANT, (tenant, 1_000)):
        runs = [run for run, _ in found]
        rows = await sweep.delete_in_batches(connection, runs, Limits({}), own, pace, needed_too=True)
        if not rows["runs"]:
            open_runs = [run for run, is_open in found if is_open]
            why = "open" if open_runs else "locked by another session"
            raise Stuck(f"Runs of tenant {tenant} are {why}, such as {[*open_runs, *runs][0]}: try again later.")
        done += rows
    for one in tables:
        deleted, limit = 1, 0
        while deleted > limit - 1:
            async with pace.batch() as limit:
                statement = BATCH.format(table=one.table, where=one.where)
                given = {"tenant": tenant, "limit": limit}
                deleted = (await connection.execute(statement, given)).rowcount  # type: ignore[arg-type, unused-ignore]
            done[one.table] += deleted
    return done
