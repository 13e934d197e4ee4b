"""Retention and erasure delete many rows at once: whatever refers to them is found by an index."""

from __future__ import annotations

from ecluse.access.maintenance import RUNS, TENANT
from ecluse.bootstrap import load_flows, retention_rules
from ecluse.flows.automation.erasure import OF_THE_FICHE
from ecluse.retention import families, sweep
from ecluse.retention.kinds import Aged
from ecluse.settings import Settings

# An index serves whose first columns are those of the key, whole or wherever the column has a value.
KEYS = """
SELECT c.conname, n.nspname, f.relname, m.nspname, t.relname, c.confdeltype = 'c', EXISTS (
    SELECT 1 FROM pg_index i WHERE i.indrelid = c.conrelid AND i.indisvalid
      AND (i.indkey::int2[])[0:cardinality(c.conkey) - 1] @> c.conkey
      AND (i.indpred IS NULL OR pg_get_expr(i.indpred, i.indrelid) ~ '^[(][a-z_]+ IS NOT NULL[)]$'))
FROM pg_constraint c JOIN pg_class f ON f.oid = c.conrelid JOIN pg_namespace n ON n.oid = f.relnamespace
JOIN pg_class t ON t.oid = c.confrelid JOIN pg_namespace m ON m.oid = t.relnamespace
WHERE c.contype = 'f' ORDER BY 1
"""


def named(table: str) -> str:
    return table if "." in table else f"public.{table}"


def test_whatever_refers_to_a_row_that_is_deleted_is_found_by_an_index(query):
    flows = load_flows(Settings())
    rules = retention_rules(Settings(), flows)
    own = sweep.own_tables({flow.name: flow for flow in flows})
    deleted = {rule.kind.table for rule in rules if isinstance(rule.kind, Aged)}
    deleted |= {*families.WITH_THE_RUN, *(table for table, _ in families.left_behind(own))}
    deleted |= {one.table for one in (*RUNS, *TENANT, *OF_THE_FICHE) if not one.changes}
    reached = {named(table) for table in deleted}
    keys = [
        (key, f"{schema}.{table}", f"{to_schema}.{to_table}", cascades, found)
        for key, schema, table, to_schema, to_table, cascades, found in query(KEYS)
    ]
    while more := {table for _, table, to, cascades, _ in keys if cascades and to in reached} - reached:
        reached |= more
    assert {"public.fiche_cache", "public.recordings", "public.runs", "dbos.workflow_status"} <= reached
    assert [(key, table) for key, table, to, _, found in keys if to in reached and not found] == []
