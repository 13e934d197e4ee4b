"""Actions of the pages of jobs."""

from __future__ import annotations

from ecluse.web.action import Action

JOBS, SCHEDULES, SERVERS = "/ui/jobs", "/ui/jobs/schedules", "/ui/jobs/servers"
SCHEDULE = "job schedule"

JOB_ACTIONS = {
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
