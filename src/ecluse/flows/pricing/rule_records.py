"""Rules of a project, as rows. A changed rule is the next version; runs keep the rule that their plan was made with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psycopg.types.json import Jsonb
from pydantic import ValidationError

from ecluse.base.errors import Conflict, InvalidInput, NotFound
from ecluse.base.validation import readable
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_all, fetch_one, fetch_value
from ecluse.flows.connections import projects
from ecluse.flows.connections.projects import naming
from ecluse.flows.pricing.rules import Terms

TERMS = tuple(Terms.model_fields)
COLUMNS = f"""id, tenant_id, project_id, name, {", ".join(TERMS)}, version, created_by, created_at, updated_by,
    updated_at"""
INSERT = f"""
INSERT INTO pricing_rules (tenant_id, project_id, name, {", ".join(TERMS)}, created_by, created_at, updated_by,
                           updated_at)
VALUES (%(tenant)s, %(project)s, %(name)s, {", ".join(f"%({one})s" for one in TERMS)}, %(by)s, ecluse_now(), %(by)s,
        ecluse_now())
RETURNING {COLUMNS}
"""  # noqa: S608 - our own names
SHOW = f"""
SELECT {COLUMNS} FROM pricing_rules WHERE tenant_id = %s AND id = %s AND deleted_at IS NULL
"""  # noqa: S608 - our own names
UPDATE = f"""
UPDATE pricing_rules SET name = %(name)s, {", ".join(f"{one} = %({one})s" for one in TERMS)}, updated_by = %(by)s,
    version = version + %(newer)s, updated_at = ecluse_now()
WHERE id = %(id)s RETURNING {COLUMNS}
"""  # noqa: S608 - our own names
OPEN_RUNS = "SELECT id FROM rule_runs WHERE project_id = %s AND status IN ('QUEUED', 'APPLYING') ORDER BY id LIMIT 1"
DELETE_ALL = """
UPDATE pricing_rules SET deleted_at = ecluse_now(), updated_at = ecluse_now(), updated_by = %s
WHERE project_id = %s AND deleted_at IS NULL
"""
DELETE = """
UPDATE pricing_rules SET deleted_at = ecluse_now(), updated_at = ecluse_now(), updated_by = %s WHERE id = %s
"""


async def show(connection: Connection, tenant: str, rule: int, *, lock: bool = False) -> Row:
    """Return the row of a rule; raise NotFound if there is none. `lock`: keep it locked until the end of the
    transaction."""
    row = await fetch_one(connection, dict, SHOW + (" FOR NO KEY UPDATE" if lock else ""), (tenant, rule))
    if row is None:
        raise NotFound(f"There is no pricing rule {rule}.")
    return row


async def create(connection: Connection, tenant: str, project: int, name: str, terms: Terms, by: str) -> Row:
    """Insert a rule of a project and return its row. Raise NotFound if there is no such project, or Refused
    NAME_TAKEN."""
    await projects.show(connection, tenant, project, lock=True)
    given = {"tenant": tenant, "project": project, "name": name, "by": by, **_columns(terms)}
    with naming("pricing rule", name):
        (row,) = await fetch_all(connection, dict, INSERT, given)
    return row


async def change(connection: Connection, tenant: str, rule: int, given: Mapping[str, Any], by: str) -> Row:
    """Change the given fields of a rule and return its row. Raise InvalidInput if the whole rule would make no
    sense."""
    known = await show(connection, tenant, rule, lock=True)
    former = {one: known[one] for one in TERMS}
    try:
        terms = Terms.model_validate({**former, **{one: given[one] for one in TERMS if one in given}})
    except ValidationError as error:
        raise InvalidInput(readable(error)) from error
    name = given.get("name", known["name"])
    newer = terms != Terms.model_validate(former)
    if not newer and name == known["name"]:
        return known
    values = {"id": rule, "name": name, "by": by, "newer": int(newer), **_columns(terms)}
    with naming("pricing rule", name):
        (row,) = await fetch_all(connection, dict, UPDATE, values)
    return row


async def delete(connection: Connection, tenant: str, rule: int, by: str) -> None:
    """Mark a rule as deleted. Runs that were made with it stay."""
    await show(connection, tenant, rule, lock=True)
    await connection.execute(DELETE, (by, rule))


async def delete_all(connection: Connection, project: int, by: str) -> None:
    """Mark the rules of a project as deleted. Raise Conflict while one of its runs changes prices."""
    if (run := await fetch_value(connection, OPEN_RUNS, (project,))) is not None:
        raise Conflict(f"Rule run {run} of pricing project {project} is not finished: wait for its end.")
    await connection.execute(DELETE_ALL, (by, project))


def _columns(terms: Terms) -> Row:
    return {one: Jsonb(value) if isinstance(value, dict) else value for one, value in terms.model_dump().items()}
