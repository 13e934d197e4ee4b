"""Audit configs of a tenant, and their versions. A version never changes, so that an audit can show the exact texts and
steps that it was made with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from psycopg.types.json import Jsonb

from ecluse.base.errors import NotFound
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_all, fetch_one, fetch_rows

ASKED = ("name", "description", "steps", "system_prompt", "model")  # what a version is made of
SWITCHES = ("run_automatically", "is_active")

COLUMNS = """id, tenant_id, name, description, steps, system_prompt, model, run_automatically, is_active, version,
    created_at, updated_at"""

SNAPSHOT = """
INSERT INTO audit_config_versions (audit_config_id, version, snapshot, created_at)
SELECT id, version, jsonb_build_object('name', name, 'description', description, 'steps', steps, 'system_prompt',
       system_prompt, 'model', model), ecluse_now()
FROM audit_configs WHERE id = %s
"""


RESOLVE = """
SELECT id, version, name, is_active, run_automatically AND is_active AS automatic FROM audit_configs
WHERE tenant_id = %(tenant)s AND deleted_at IS NULL
  AND (id = ANY(%(specific)s::bigint[]) OR (%(automatic)s AND run_automatically AND is_active))
ORDER BY id
"""


class ConfigVersion(NamedTuple):
    """The current version of a config, to which a new audit refers."""

    id: int
    version: int
    name: str


class Resolved(NamedTuple):
    """The configs to audit with. `unknown` and `inactive` are requested ids that are not in `configs`."""

    configs: list[ConfigVersion]
    unknown: list[int]
    inactive: list[int]


async def resolve_configs(
    connection: Connection, tenant: str, specific_ids: Sequence[int], use_automatic: bool
) -> Resolved:
    """Return the active configs among `specific_ids` and, with `use_automatic`, all that run automatically: without
    duplicates, by id."""
    given = {"tenant": tenant, "specific": list(specific_ids), "automatic": use_automatic}
    rows = await fetch_rows(connection, RESOLVE, given)
    active = [ConfigVersion(*row[:3]) for row in rows if row[3]]
    known = {row[0] for row in rows}
    asked = list(dict.fromkeys(specific_ids))
    return Resolved(
        active,
        [one for one in asked if one not in known],
        [one for one in asked if one in known - {config.id for config in active}],
    )


async def create(connection: Connection, tenant: str, given: Mapping[str, Any]) -> Row:
    """Insert a config and its first version, in the caller's transaction; return its row."""
    names = [name for name in (*ASKED, *SWITCHES) if name in given]
    sql = (
        f"INSERT INTO audit_configs (tenant_id, {', '.join(names)}, created_at, updated_at)"  # noqa: S608 - our names
        f" VALUES (%s, {', '.join(['%s'] * len(names))}, ecluse_now(), ecluse_now()) RETURNING {COLUMNS}"
    )
    (row,) = await fetch_all(connection, dict, sql, [tenant, *(_stored(given[name]) for name in names)])
    await connection.execute(SNAPSHOT, (row["id"],))
    return row


async def update(connection: Connection, tenant: str, config_id: int, given: Mapping[str, Any]) -> Row:
    """Update a config and return its row. A changed text, step or model makes a new version; switching it on or off, or
    unchanged values, make none. Raise NotFound if the tenant has no such config."""
    known = await show(connection, tenant, config_id, lock=True)
    changed = {name: value for name, value in given.items() if value != known[name]}
    if not changed:
        return known
    bump = any(name in ASKED for name in changed)
    sets = ", ".join(f"{name} = %s" for name in changed)
    sql = (
        f"UPDATE audit_configs SET {sets}, version = version + {int(bump)}, updated_at = ecluse_now()"  # noqa: S608
        f" WHERE id = %s RETURNING {COLUMNS}"
    )
    (row,) = await fetch_all(connection, dict, sql, [*map(_stored, changed.values()), config_id])
    if bump:
        await connection.execute(SNAPSHOT, (config_id,))
    return row


async def delete(connection: Connection, tenant: str, config_id: int) -> None:
    """Mark a config as deleted: it is not used any more. Audits that were made with it still refer to their version.
    Raise NotFound if the tenant has no such config."""
    cursor = await connection.execute(
        "UPDATE audit_configs SET deleted_at = ecluse_now(), updated_at = ecluse_now()"
        " WHERE tenant_id = %s AND id = %s AND deleted_at IS NULL",
        (tenant, config_id),
    )
    if not cursor.rowcount:
        raise _missing(config_id)


async def show(connection: Connection, tenant: str, config_id: int, *, lock: bool = False) -> Row:
    """Return the row of a config; raise NotFound if the tenant has no such config, or it was deleted. `lock`: keep it
    locked until the end of the transaction."""
    sql = f"SELECT {COLUMNS} FROM audit_configs WHERE tenant_id = %s AND id = %s AND deleted_at IS NULL"  # noqa: S608
    row = await fetch_one(connection, dict, sql + (" FOR NO KEY UPDATE" if lock else ""), [tenant, config_id])
    if row is None:
        raise _missing(config_id)
    return row


class Snapshot(NamedTuple):
    """The content of one version of a config."""

    audit_config_id: int
    version: int
    snapshot: Row


async def snapshots(connection: Connection, wanted: Sequence[tuple[int, int]]) -> list[Snapshot]:
    """Return the content of these versions, given as (config id, version). A version that does not exist is left
    out."""
    return await fetch_all(
        connection,
        Snapshot,
        "SELECT v.audit_config_id, v.version, v.snapshot FROM unnest(%s::bigint[], %s::int[]) AS k(id, version)"
        " JOIN audit_config_versions v ON v.audit_config_id = k.id AND v.version = k.version",
        [list(column) for column in zip(*wanted, strict=True)],
    )


def _stored(value: Any) -> Any:
    """Return the value as a statement parameter: a list as JSON."""
    return Jsonb(value) if isinstance(value, list) else value


def _missing(config_id: int) -> NotFound:
    return NotFound(f"There is no audit config {config_id}.")
