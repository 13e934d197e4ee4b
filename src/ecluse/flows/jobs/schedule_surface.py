"""Job schedules in the API and on the command line."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import Query

from ecluse.access.commands import Command
from ecluse.access.listing import Listing, equal
from ecluse.access.resource import Resource
from ecluse.access.surface import Act, Look, Noun, Surface
from ecluse.access.wire import camel
from ecluse.base.timetable import timetable
from ecluse.db.query import Row
from ecluse.flows.connections.given import sealing
from ecluse.flows.jobs import fire, schedules
from ecluse.flows.jobs.schedule_shapes import (
    ChangedJobSchedule,
    JobSchedule,
    JobScheduleInFull,
    JobSchedulePreview,
    JobScheduleRow,
    JobSlotRow,
    MadeJob,
)

surface = Surface("jobs")
READ = "jobs.read"
SCHEDULE = Resource(
    surface, "/api/jobs/schedules/{job_schedule_id}", "jobs", "job_schedule", "jobs schedules", JobScheduleInFull
)

Count = Annotated[int, Query(ge=1, le=50)]
OPTIONS = {"cron": "cronExpression", "tz": "timezone", "server": "serverInstanceId", "type": "jobType"}


async def _find(look: Look, text: str) -> schedules.Named:
    return await schedules.find(look.connection, look.tenant, text)


JobScheduleId = Annotated[schedules.Named, Noun("job schedule", _find)]


async def require_schedule(look: Look, job_schedule_id: str) -> None:
    """Raise NotFound if the tenant never had such a schedule. A deleted one is accepted: its slots stay."""
    await schedules.find(look.connection, look.tenant, job_schedule_id)


SCHEDULES = Listing("schedules", JobScheduleRow, "job_schedule_list", READ, filters=equal(enabled=bool), order=("id",))
SLOTS = Listing("slots", JobSlotRow, "job_slots", READ, order=("-due_at",), named=("job_schedule_id",))

SCHEDULE.lists(
    SCHEDULES,
    list_job_schedules="List the job schedules of the organisation, the oldest first; without their payloads.",
    columns=("id", "name", "cronExpression", "timezone", "nextRunAt", "lastRunStatus", "lastJobStatus", "error"),
    empty="no job schedules yet: `ecluse jobs schedules create`",
)
surface.listing(
    f"{SCHEDULE.one}/slots",
    SLOTS,
    check=require_schedule,
    list_job_slots="List the due times of a job schedule with the decision on each, the newest first; of a deleted"
    " schedule, too.",
    command=Command("jobs schedules slots", empty="no due time has been decided yet"),
)


@SCHEDULE.creates(
    refuses=["NO_SECRET_KEY", "LIMIT_REACHED"],
    arguments=("name",),
    options=OPTIONS,
    example="ecluse jobs schedules create backup --server cmf1w2x3y0000abcdefghijkl --cron '0 2 * * *'"
    ' --type shell --payload \'{"command": "backup --all"}\'',
)
async def create_job_schedule(act: Act, body: JobSchedule) -> Row:
    """Create a job schedule; only due times from now on are fired."""
    await act.require_room("schedules")
    created = await schedules.create(act.connection, act.tenant, body.model_dump(), act.caller.name, _sealing(act))
    return await _shown(act, created)


@SCHEDULE.shows()
async def show_job_schedule(look: Look, job_schedule_id: JobScheduleId) -> Row:
    """Show a job schedule; the secrets in its payload are hidden."""
    return await _shown(look, job_schedule_id.id)


@SCHEDULE.changes(refuses=["NO_SECRET_KEY"], action="update", options=OPTIONS)
async def change_job_schedule(act: Act, job_schedule_id: JobScheduleId, body: ChangedJobSchedule) -> Row:
    """Change a job schedule: only the given fields change. A due time that was not fired yet is skipped if the change
    concerns when it is due; jobs that were made stay as they are."""
    await schedules.change(act.connection, job_schedule_id, body.model_dump(exclude_unset=True), _sealing(act))
    return await _shown(act, job_schedule_id.id)


@SCHEDULE.deletes()
async def delete_job_schedule(act: Act, job_schedule_id: JobScheduleId) -> Row:
    """Delete a job schedule. Its jobs and slots stay; a job that waits is still executed."""
    await schedules.delete(act.connection, job_schedule_id)
    return {"id": job_schedule_id.id, "deleted": True}


@SCHEDULE.does("pause")
async def pause_job_schedule(act: Act, job_schedule_id: JobScheduleId) -> Row:
    """Pause a job schedule: no job is made until it is resumed, except by hand."""
    await schedules.switch(act.connection, job_schedule_id, enabled=False)
    return await _shown(act, job_schedule_id.id)


@SCHEDULE.does("resume")
async def resume_job_schedule(act: Act, job_schedule_id: JobScheduleId) -> Row:
    """Resume a paused job schedule. Due times of the pause are not caught up on."""
    await schedules.switch(act.connection, job_schedule_id, enabled=True)
    return await _shown(act, job_schedule_id.id)


@SCHEDULE.does("run", refuses=["SERVER_GONE"], answer=MadeJob, status=201, command="jobs run")
async def run_job_schedule(act: Act, job_schedule_id: JobScheduleId) -> Row:
    """Make a job of a schedule now, even if it is paused or has active jobs. Its due times are not affected."""
    await _shown(act, job_schedule_id.id)  # raises NotFound for a deleted one
    made = await fire.run_now(act.connection, job_schedule_id.schedule_id, act.caller.name)
    return {"jobId": made["id"], "jobRunId": made["run_id"], "hostId": made["host_id"]}


@surface.read(
    f"{SCHEDULE.one}/preview", needs=READ, answer=JobSchedulePreview, command=Command("jobs schedules preview")
)
async def preview_job_schedule(look: Look, job_schedule_id: JobScheduleId, count: Count = 50) -> Row:
    """Preview the next due times, whether or not the schedule is enabled, with a mark where a clock change or the
    execution window moves one."""
    row = await schedules.show(look.connection, look.tenant, job_schedule_id.id)
    window = (row["execution_window_start"], row["execution_window_end"])
    table = timetable(row["cron_expression"], row["timezone"], *window)
    fires = [one._asdict() for one in table.preview(look.kit.clock.now(), count)]
    return {"inWords": table.cron.explain(), "timezone": row["timezone"], "fires": fires}


def _sealing(act: Act) -> schedules.Sealing:
    return partial(sealing, act)


async def _shown(look: Look, job_schedule: str) -> Row:
    row = await schedules.show(look.connection, look.tenant, job_schedule)
    return camel({name: row[name] for name in JobScheduleInFull.model_fields})
