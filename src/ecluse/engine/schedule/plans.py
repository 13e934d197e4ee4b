"""Schedules with their plans: one way to create, change, delete and fire the schedules of every flow. A plan is the
content of a schedule besides its name and its timetable; by default it is the input of the runs."""

# ruff: noqa: ARG002 - the hooks take arguments that a flow with tables of its own needs

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from ecluse.base.errors import InvalidInput
from ecluse.base.validation import readable
from ecluse.db.connect import Connection
from ecluse.db.query import Row
from ecluse.engine.model.flow import Flow
from ecluse.engine.runs.start import Started
from ecluse.engine.schedule.schedules import (
    NewSchedule,
    check_schedulable,
    create_schedule,
    delete_schedule,
    fire_by_hand,
    load_schedule,
    update_schedule,
)

M = TypeVar("M", bound=BaseModel)
TIMETABLE = tuple(one.name for one in fields(NewSchedule) if one.name not in ("flow", "input", "tenant_id"))


class Fired(NamedTuple):
    """A run that was started by hand from a schedule, and warnings for the person who started it."""

    started: Started
    warnings: list[str]


class Plans:
    """Storage of the plans of a flow's schedules: by default in `schedules.input`. A flow that stores them in its own
    tables overrides the methods (`Flow.plans`). `known` is a plan as `load` returns it."""

    def parsed(self, flow: Flow, given: Mapping[str, Any]) -> Any:
        """Validate a plan given for a new schedule, and return it as the flow's model. Raise InvalidInput if it is
        invalid, or the flow cannot be scheduled."""
        check_schedulable(flow)
        return parsed(flow.plan or flow.input, given)

    def changed(self, flow: Flow, known: Any, given: Mapping[str, Any]) -> Any:
        """Return the known plan with the given fields replaced, as the flow's model. Raise InvalidInput if it is
        invalid."""
        return self.parsed(flow, {**known, **given})

    def names_addresses(self, given: Mapping[str, Any]) -> bool:
        """Return whether these fields of a plan, not validated yet, may name mail addresses; by default never."""
        return False

    def input(self, plan: Any) -> Row:
        """Return the input of the runs that a schedule with this plan starts."""
        found: Row = plan.model_dump(mode="json")
        return found

    async def load(self, connection: Connection, row: Row) -> Any:
        """Return the plan of a schedule; `row` has the columns of the schedule."""
        return row["input"]

    async def shown(self, connection: Connection, row: Row) -> Row:
        """Return the plan as it is shown to people and API callers: without secrets."""
        found: Row = await self.load(connection, row)
        return found

    async def save(
        self, connection: Connection, schedule_id: int, new: NewSchedule, plan: Any, known: Any | None
    ) -> Row:
        """Check and store the plan of a schedule that has just been created (`known` None) or changed, in the same
        transaction. Return the fields that only this answer shows, such as a new secret. By default nothing is stored:
        the plan is the input of the runs."""
        return {}

    async def check_enabled(self, connection: Connection, tenant_id: str, plan: Any) -> None:
        """Raise Conflict if a schedule with this plan may not be enabled, because its runs would fail. Not called for
        changes of a schedule that is enabled already. By default every schedule may."""

    async def forget(self, connection: Connection, schedule_id: int) -> None:
        """Delete the data that a deleted schedule no longer needs; by default there is none."""

    async def fire(
        self, connection: Connection, flow: Flow, row: Row, instead: Mapping[str, Any] | None, correlation_id: str
    ) -> Fired:
        """Start a run of the schedule now. The fields in `instead` replace fields of the plan, for this run only. Raise
        InvalidInput if the plan is then invalid, Conflict if a budget is used up."""
        given = None if instead is None else self.input(self.changed(flow, await self.load(connection, row), instead))
        started = await fire_by_hand(
            connection,
            row["tenant_id"],
            row["id"],
            flow,
            input=given,
            start=lambda start: replace(start, correlation_id=correlation_id),
        )
        return Fired(started, [])


IN_INPUT = Plans()


def plans_of(flow: Flow) -> Plans:
    return flow.plans or IN_INPUT


def parsed(model: type[M], given: Mapping[str, Any]) -> M:
    """Validate a plan, or changes to one, and return it as the model. Raise InvalidInput, which names the invalid
    fields."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise InvalidInput(f"plan: {readable(error)}") from error


class Created(NamedTuple):
    """A new schedule: its id, and the fields that are shown only in the answer to its creation."""

    id: int
    once: Row  # secrets that are shown in this answer only


async def create_planned(connection: Connection, new: NewSchedule, plan: Any) -> Created:
    """Create a schedule with its plan, in one transaction. Raise InvalidInput if a column or the plan is invalid,
    Conflict if the name is taken or it may not be enabled."""
    plans = plans_of(new.flow)
    async with connection.transaction():
        schedule_id = await create_schedule(connection, replace(new, input=plans.input(plan)))
        once = await plans.save(connection, schedule_id, new, plan, None)
        if new.enabled:
            await plans.check_enabled(connection, new.tenant_id, plan)
        return Created(schedule_id, once)


# Takes a schedule's row and its plan; returns the columns to change, and the new plan.
Changing = Callable[[Row, Any], tuple[Mapping[str, Any], Any]]


async def change_planned(
    connection: Connection, flow: Flow, tenant_id: str, schedule_id: int, changing: Changing
) -> Row:
    """Change a schedule and its plan, in one transaction: `changing` gets the schedule's row and its plan, and returns
    the columns to change and the new plan. Return the fields that only this answer shows, such as a new secret. Raise
    NotFound if the tenant has no such schedule, InvalidInput if a column or the plan is invalid, Conflict if the name
    is taken or it may not be enabled."""
    plans = plans_of(flow)
    async with connection.transaction():
        row = await load_schedule(connection, tenant_id, schedule_id, lock=True)
        known = await plans.load(connection, row)
        columns, plan = changing(row, known)
        kept = {name: row[name] for name in TIMETABLE}
        new = NewSchedule(flow, **{**kept, **columns}, input=plans.input(plan), tenant_id=tenant_id)
        await update_schedule(connection, tenant_id, schedule_id, new)
        once = await plans.save(connection, schedule_id, new, plan, known)
        if new.enabled and not row["enabled"]:
            await plans.check_enabled(connection, tenant_id, plan)
        return once


async def delete_planned(
    connection: Connection, plans: Plans, tenant_id: str, schedule_id: int, *, flow: Flow | None = None
) -> None:
    """Delete a schedule. Its runs and slots stay, an open run is not stopped, and its name can be used again. `flow`:
    its flow, whose `on_unfired` is called. Raise NotFound if the tenant has no such schedule."""
    async with connection.transaction():
        await delete_schedule(connection, tenant_id, schedule_id, flow=flow)
        await plans.forget(connection, schedule_id)
