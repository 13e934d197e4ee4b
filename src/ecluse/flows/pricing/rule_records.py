"""Rules of a project, as rows. A changed rule is the next version; runs keep the rule that their plan was made with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from ecluse.access.records import Records
from ecluse.base.errors import Conflict, InvalidInput
from ecluse.base.validation import readable
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_value
from ecluse.flows.connections import projects
from ecluse.flows.pricing.rules import Terms

RULES = Records("pricing rule", "pricing_rules")
show, delete = RULES.show, RULES.delete
TERMS = tuple(Terms.model_fields)
OPEN_RUNS = "SELECT id FROM rule_runs WHERE project_id = %s AND status IN ('QUEUED', 'APPLYING') ORDER BY id LIMIT 1"
DELETE_ALL = """
UPDATE pricing_rules SET deleted_at = ecluse_now(), updated_at = ecluse_now(), updated_by = %s
WHERE project_id = %s AND deleted_at IS NULL
"""


async def create(connection: Connection, tenant: str, project: int, name: str, terms: Terms, by: str) -> Row:
    """Insert a rule of a project and return its row. Raise NotFound if there is no such project, or Refused
    NAME_TAKEN."""
    await projects.show(connection, tenant, project, lock=True)
    given = {"project_id": project, "name": name, **terms.model_dump(include=set(TERMS))}
    return await RULES.insert(connection, tenant, given, by)


async def change(connection: Connection, tenant: str, rule: int, given: Mapping[str, Any], by: str) -> Row:
    """Change the given fields of a rule and return its row. Raise InvalidInput if the whole rule would make no
    sense."""
    known = await show(connection, tenant, rule, lock=True)
    try:
        terms = Terms.model_validate({one: given.get(one, known[one]) for one in TERMS})
    except ValidationError as error:
        raise InvalidInput(readable(error)) from error
    return await RULES.change(connection, known, {**given, **terms.model_dump()}, by, versioned=TERMS)


async def delete_all(connection: Connection, project: int, by: str) -> None:
    """Mark the rules of a project as deleted. Raise Conflict while one of its runs changes prices."""
    if (run := await fetch_value(connection, OPEN_RUNS, (project,))) is not None:
        raise Conflict(f"Rule run {run} of pricing project {project} is not finished: wait for its end.")
    await connection.execute(DELETE_ALL, (by, project))
