"""The flow `jobs`: its schedules make jobs, which agents execute. It has no runs of its own."""

# ruff: noqa: ARG002 - most plans need what the hooks take

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from ecluse.base.errors import InvalidInput
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_one
from ecluse.engine import Fired, Flow, Plans
from ecluse.flows.jobs.fire import fire, on_unfired

SHOWN = """
SELECT id, server_instance_id, description, job_type, payload, timeout_seconds, max_retries, backoff_ms, backoff_type
FROM job_schedules WHERE schedule_id = %s
"""
INSTEAD = "Schedules of jobs have routes and commands of their own: /api/jobs/schedules, `ecluse jobs schedules`."


class NoInput(BaseModel):
    """The empty input of the flow: it has no runs."""

    model_config = ConfigDict(extra="forbid")


class JobPlans(Plans):
    """Settings of job schedules for the routes that all flows share: shown there, changed by routes of their own."""

    def parsed(self, flow: Flow, given: Mapping[str, Any]) -> Any:
        raise InvalidInput(INSTEAD)

    def changed(self, flow: Flow, known: Any, given: Mapping[str, Any]) -> Any:
        if given:
            raise InvalidInput(INSTEAD)
        return known

    def input(self, plan: Any) -> Row:
        return {}

    async def load(self, connection: Connection, row: Row) -> Any:
        return await fetch_one(connection, dict, SHOWN, (row["id"],)) or {}

    async def fire(
        self, connection: Connection, flow: Flow, row: Row, instead: Mapping[str, Any] | None, correlation_id: str
    ) -> Fired:
        raise InvalidInput(INSTEAD)


FLOW = Flow(
    name="jobs",
    stages=(),
    story=None,
    input=NoInput,
    fire=fire,
    on_unfired=on_unfired,
    unique_names=False,
    not_by_hand=INSTEAD,
    plans=JobPlans(),
)
