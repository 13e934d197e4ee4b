"""Texts of the operations that the pages of jobs, job schedules, servers and agents offer."""

from __future__ import annotations

from ecluse.web.action_texts import Action

JOBS, SCHEDULES, SERVERS = "/ui/jobs", "/ui/jobs/schedules", "/ui/jobs/servers"
SCHEDULE = "job schedule"

JOB_ACTIONS = {
    "create_job_schedule": Action(
        "New schedule",
        "The schedule is created and, if it is enabled, creates jobs at its due times.",
        "The schedule was created.",
        "",
        SCHEDULES,
        shows=f"{SCHEDULES}/{{id}}",
    ),
    "change_job_schedule": Action(
        "Edit",
        "This schedule changes for all later jobs. Existing jobs do not change.",
        "The schedule was saved.",
        SCHEDULE,
        SCHEDULES,
    ),
    "delete_job_schedule": Action(
        "Delete",
        "This schedule is deleted, for good. Its jobs stay; waiting jobs are still executed.",
        "The schedule was deleted.",
        SCHEDULE,
        SCHEDULES,
        leaves=True,
        grave=True,
    ),
    "run_job_schedule": Action(
        "Run now",
        "A job of this schedule is created now, even if the schedule is paused or other jobs of it are active. Its due "
        "times do not change.",
        "A job was created.",
        SCHEDULE,
        SCHEDULES,
        shows=f"{JOBS}/{{jobId}}",
    ),
    "pause_job_schedule": Action(
        "Pause",
        "This schedule creates no more jobs until it is resumed. Existing jobs are still executed.",
        "The schedule is paused.",
        SCHEDULE,
        SCHEDULES,
    ),
    "resume_job_schedule": Action(
        "Resume",
        "This schedule creates jobs again, from its next due time on.",
        "The schedule is resumed.",
        SCHEDULE,
        SCHEDULES,
    ),
    "cancel_job": Action(
        "Cancel job",
        "A waiting job fails at once. A running job is stopped by its agent, at the next renewal of its lease.",
        "The job is cancelled.",
        "",
        JOBS,
        grave=True,
    ),
    "retry_job": Action(
        "Retry",
        "A new job with the same payload is created now. The failed job does not change.",
        "A new job was created.",
        "",
        JOBS,
        shows=f"{JOBS}/{{id}}",
    ),
    "create_job_host": Action(
        "New host", "The host is created. Its agent needs an enrolment.", "The host was created.", "", SERVERS
    ),
    "create_enrolment_token": Action(
        "New token",
        "A token is created with which an agent of this host enrols, once, within an hour. When it enrols, the former "
        "agent of the host is revoked.",
        "The token was created. Start the agent on the host with it: ecluse agent --server URL --token-file FILE",
        "host",
        SERVERS,
    ),
    "delete_job_host": Action(
        "Delete",
        "This host is deleted, for good, and its agent is revoked. Its pending jobs are not executed: they fail "
        "NO_AGENT. Its running jobs count as lost when their leases end.",
        "The host was deleted.",
        "host",
        SERVERS,
        leaves=True,
        grave=True,
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
        "This server changes for all later jobs. If its host changes, the agent of the new host executes them.",
        "The server was saved.",
        "server",
        SERVERS,
    ),
    "delete_job_server": Action(
        "Delete",
        "This server is deleted, for good. Its schedules create no jobs until they name another server.",
        "The server was deleted.",
        "server",
        SERVERS,
        leaves=True,
        grave=True,
    ),
    "revoke_job_agent": Action(
        "Revoke",
        "The agent is refused from now on, for good. Jobs that it is executing count as lost when their leases end. "
        "The host needs a new enrolment.",
        "The agent was revoked.",
        "",
        SERVERS,
        grave=True,
    ),
}
