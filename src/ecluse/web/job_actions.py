"""Actions of the pages of jobs."""

from __future__ import annotations

from ecluse.web.action_texts import Action

JOBS, SCHEDULES, SERVERS = "/ui/jobs", "/ui/jobs/schedules", "/ui/jobs/servers"
SCHEDULE = "job schedule"

JOB_ACTIONS = {
    "create_job_schedule": Action(
        "New schedule",
        "The schedule is created and, if it is enabled, makes jobs at its due times.",
        "The schedule was created.",
        "",
        SCHEDULES,
        shows=f"{SCHEDULES}/{{id}}",
    ),
    "change_job_schedule": Action(
        "Edit",
        "This schedule changes for all later jobs. Jobs that were made stay as they are.",
        "The schedule was saved.",
        SCHEDULE,
        SCHEDULES,
    ),
    "delete_job_schedule": Action(
        "Delete",
        "This schedule is deleted, for good. Its jobs stay; those that wait are executed.",
        "The schedule was deleted.",
        SCHEDULE,
        SCHEDULES,
        leaves=True,
        grave=True,
    ),
    "run_job_schedule": Action(
        "Run now",
        "A job of this schedule is made now, even if it is paused or others of it are active. Its due times stay as "
        "they are.",
        "A job was made.",
        SCHEDULE,
        SCHEDULES,
        shows=f"{JOBS}/{{jobId}}",
    ),
    "pause_job_schedule": Action(
        "Pause",
        "This schedule makes no more jobs until it is resumed. Jobs that were made are executed.",
        "The schedule is paused.",
        SCHEDULE,
        SCHEDULES,
    ),
    "resume_job_schedule": Action(
        "Resume",
        "This schedule makes jobs again, from its next due time on.",
        "The schedule is resumed.",
        SCHEDULE,
        SCHEDULES,
    ),
    "cancel_job": Action(
        "Cancel job",
        "A job that waits fails at once. One that is running is stopped by its agent, at the next renewal of its "
        "lease.",
        "The job is cancelled.",
        "",
        JOBS,
        grave=True,
    ),
    "retry_job": Action(
        "Retry",
        "A new job like this one is made now. The failed one stays as it is.",
        "A new job was made.",
        "",
        JOBS,
        shows=f"{JOBS}/{{id}}",
    ),
    "create_job_host": Action(
        "New host", "The host is created. Its agent needs an enrolment.", "The host was created.", "", SERVERS
    ),
    "create_job_server": Action(
        "New server",
        "The server is created. The agent of its host executes its jobs.",
        "The server was created.",
        "",
        SERVERS,
    ),
    "change_job_server": Action(
        "Edit",
        "This server changes for all later jobs. On another host, the agent there executes them.",
        "The server was saved.",
        "server",
        SERVERS,
    ),
    "delete_job_server": Action(
        "Delete",
        "This server is deleted, for good. Its schedules make no jobs until they name another one.",
        "The server was deleted.",
        "server",
        SERVERS,
        leaves=True,
        grave=True,
    ),
    "revoke_job_agent": Action(
        "Revoke",
        "The agent is refused from now on, for good. What it is executing counts as lost when its leases end. The host "
        "needs a new enrolment.",
        "The agent was revoked.",
        "",
        SERVERS,
        grave=True,
    ),
}
