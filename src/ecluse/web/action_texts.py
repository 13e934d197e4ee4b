"""Texts of the operations that pages offer: the label of the button, the sentence that asks for a
confirmation, and the one that is shown once the operation is done."""

from __future__ import annotations

from typing import NamedTuple

SCHEDULES, LANES, AUDITS = "/ui/schedules", "/ui/lanes", "/ui/audits"
CONNECTIONS, NOTIFICATIONS = "/ui/connections", "/ui/connections/notifications"
PRICING, PROJECTS, RULES = "/ui/pricing", "/ui/pricing/projects", "/ui/pricing/rules"
RULE_RUN = "/ui/pricing/runs/{id}"
REQUESTS = "/ui/requests"
CHANGED = "Schedule {schedule_id} changes for all later runs. Open runs keep the settings they started with."
DELETED = "Schedule {schedule_id} is deleted, for good. Its runs stay."
FIRED = "A run of schedule {schedule_id} starts now. Its due times do not change."


class Action(NamedTuple):
    """The texts of an operation that pages offer, and the pages that its form leads to."""

    label: str  # of the button
    says: str  # sentence in the form: what will change
    done: str  # message once the operation is done
    what: str = ""  # kind of the record that the operation acts on; if set, the form reads the record to name it
    home: str = "/ui/runs"  # page to go to afterwards, unless the form was opened from another page
    leaves: bool = False  # the page that the form was opened from no longer exists afterwards
    grave: bool = False  # cannot be undone, or stops work
    shows: str = ""  # page of the record that the operation created, to go to instead of the others
    previews: bool = True  # the form shows the preview of the command; False if `says` tells all of it


ACTION_TEXTS = {
    "end_run": Action(
        "End run",
        "Run {run_id} ends now, as cancelled. Finished targets keep their outcome, calls in flight are finished, and "
        "nothing more is started.",
        "Run {run_id} was ended.",
        grave=True,
    ),
    "redrive_run": Action(
        "Redrive run",
        "A new run repeats the chosen targets of run {run_id}. Successful targets are not touched.",
        "The targets are redriven.",
    ),
    "start_run": Action("Start again", "A new run of this flow starts now, with this input.", "A run was started."),
    "run_schedule": Action("Run now", FIRED, "A run was started.", "schedule", SCHEDULES),
    "enable_schedule_of_flow": Action(
        "Enable",
        "Schedule {schedule_id} starts runs again, from its next due time on.",
        "The schedule is enabled.",
        "schedule",
        SCHEDULES,
    ),
    "disable_schedule_of_flow": Action(
        "Disable",
        "Schedule {schedule_id} starts no more runs until it is enabled. A run that is open goes on.",
        "The schedule is disabled.",
        "schedule",
        SCHEDULES,
    ),
    "create_schedule": Action("New schedule", "The schedule is created.", "The schedule was created.", "", SCHEDULES),
    "change_schedule": Action("Edit", CHANGED, "The schedule was saved.", "schedule", SCHEDULES),
    "delete_schedule": Action(
        "Delete", DELETED, "The schedule was deleted.", "schedule", SCHEDULES, leaves=True, grave=True
    ),
    "create_automation_schedule": Action(
        "New automation schedule",
        "The schedule is created and, if it is active, runs at its due times.",
        "The schedule was created.",
        "",
        SCHEDULES,
    ),
    "change_automation_schedule": Action("Edit", CHANGED, "The schedule was saved.", "schedule", SCHEDULES),
    "pause_lane_now": Action(
        "Pause",
        "No replica starts calls of lane {name} until it is resumed. Calls in flight finish.",
        "Lane {name} is paused.",
        "lane",
        LANES,
        grave=True,
    ),
    "resume_lane_now": Action(
        "Resume", "Calls of lane {name} start again at once.", "Lane {name} is resumed.", "lane", LANES
    ),
    "cap_lane": Action(
        "Change caps",
        "The caps of lane {name} change on every replica.",
        "Lane {name} was changed.",
        "lane",
        LANES,
        previews=False,
    ),
    "put_budget": Action(
        "Set budget",
        "Once this amount is spent, paid calls wait and new runs are refused. Calls that already wait for a budget are "
        "tried again at once.",
        "The budget was set.",
        "",
        LANES,
    ),
    "remove_budget": Action(
        "Delete",
        "Budget {budget_id} is deleted. It no longer limits paid calls, and calls that wait for it continue.",
        "The budget was deleted.",
        "budget",
        LANES,
        leaves=True,
        grave=True,
    ),
    "create_connection": Action(
        "Connect",
        "The vendor is called once with this key. If it accepts the key, the connection is stored.",
        "The connection was created.",
        "",
        CONNECTIONS,
    ),
    "change_connection": Action(
        "Edit",
        "Connection {kind} changes for all later calls. A new key is tested first.",
        "The connection was saved.",
        "connection",
        CONNECTIONS,
    ),
    "delete_connection": Action(
        "Delete",
        "Connection {kind} and its key are deleted. Calls not sent yet will fail.",
        "The connection was deleted.",
        "connection",
        CONNECTIONS,
        leaves=True,
        grave=True,
    ),
    "test_connection": Action(
        "Test", "The vendor is called once with the stored key.", "The connection works.", "connection", CONNECTIONS
    ),
    "create_endpoint": Action(
        "New endpoint",
        "Every event that matches is sent to this endpoint from now on. A mail address is first sent a link that "
        "confirms it.",
        "The endpoint was created.",
        "",
        NOTIFICATIONS,
    ),
    "change_endpoint": Action(
        "Edit",
        "Endpoint {endpoint_id} changes for all deliveries that are not made yet.",
        "The endpoint was saved.",
        "endpoint",
        NOTIFICATIONS,
    ),
    "delete_endpoint": Action(
        "Delete",
        "Endpoint {endpoint_id} is deleted, for good. Nothing more is sent to it; its past deliveries stay.",
        "The endpoint was deleted.",
        "endpoint",
        NOTIFICATIONS,
        leaves=True,
        grave=True,
    ),
    "test_endpoint": Action(
        "Test",
        "A message of type ping is sent to endpoint {endpoint_id}.",
        "The message is being sent: its delivery shows the result.",
        "endpoint",
        NOTIFICATIONS,
    ),
    "rotate_endpoint_secret": Action(
        "New secret",
        "Endpoint {endpoint_id} gets a new signing secret. For a day messages are signed with the old one as well.",
        "The secret was replaced.",
        "endpoint",
        NOTIFICATIONS,
        grave=True,
    ),
    "redeliver": Action(
        "Deliver again",
        "The message of delivery {delivery_id} is sent again, under the same message id.",
        "The message is being sent again.",
        "delivery",
        NOTIFICATIONS,
    ),
    "create_config": Action(
        "New config", "The audit config is created as version 1.", "The config was created.", "", AUDITS
    ),
    "change_config": Action(
        "Edit",
        "Audit config {config_id} changes for later audits. Audits already made keep the version they were made with.",
        "The config was saved.",
        "audit config",
        AUDITS,
    ),
    "delete_config": Action(
        "Delete",
        "Audit config {config_id} is deleted, for good. Audits made with it stay.",
        "The config was deleted.",
        "audit config",
        AUDITS,
        leaves=True,
        grave=True,
    ),
    "start_audit": Action("Audit a fiche", "One fiche is audited now.", "The audit was started.", "", AUDITS),
    "create_project": Action(
        "New project",
        "The shop is called once with this token. If it accepts the token, the project is stored.",
        "The project was created.",
        "",
        PROJECTS,
    ),
    "change_project": Action(
        "Edit",
        "Project {project_id} changes for all later calls. A new token is tested first.",
        "The project was saved.",
        "project",
        PROJECTS,
    ),
    "delete_project": Action(
        "Delete",
        "Project {project_id} is deleted, for good, with its rules and its token. Its past runs stay.",
        "The project was deleted.",
        "project",
        PROJECTS,
        leaves=True,
        grave=True,
    ),
    "create_rule": Action(
        "New rule",
        "The rule is created. It changes no price until a run of it is queued.",
        "The rule was created.",
        "",
        RULES,
    ),
    "change_rule": Action(
        "Edit",
        "Rule {rule_id} changes for later runs. Runs keep the rule that their plan was made with.",
        "The rule was saved.",
        "rule",
        RULES,
    ),
    "delete_rule": Action(
        "Delete",
        "Rule {rule_id} is deleted, for good. Its past runs stay.",
        "The rule was deleted.",
        "rule",
        RULES,
        leaves=True,
        grave=True,
    ),
    "preview_rule": Action(
        "Preview",
        "The catalogue of the shop is read, and a plan is made. No price changes.",
        "The preview was started.",
        "",
        PRICING,
        shows=RULE_RUN,
    ),
    "queue_rule_run": Action(
        "Queue",
        "{changed:price changes|prices change} in the shop, exactly as planned. A price that was changed since the "
        "preview is left as it is.",
        "The run was queued.",
        "rule run",
        PRICING,
        shows=RULE_RUN,
        previews=False,
    ),
    "retry_rule_run": Action(
        "Retry failed",
        "{FAILED:failed target is|failed targets are} applied again. Prices that were applied are not touched.",
        "The failed targets are applied again.",
        "rule run",
        PRICING,
        shows=RULE_RUN,
        previews=False,
    ),
    "roll_back_rule_run": Action(
        "Roll back",
        "{APPLIED:applied price is|applied prices are} set back to the former value in the shop, unless changed since.",
        "The rollback was started.",
        "rule run",
        PRICING,
        shows=RULE_RUN,
        previews=False,
        grave=True,
    ),
    "reconcile_rule_run": Action(
        "Reconcile",
        "{APPLIED:applied price is|applied prices are} read from the shop and compared. No price changes.",
        "The reconciliation was started.",
        "rule run",
        PRICING,
        shows=RULE_RUN,
    ),
    "correct_rule_run": Action(
        "Correct mismatches",
        "A new rule run is created for the prices that the latest reconciliation found changed. No price changes until "
        "that run is queued.",
        "The correcting run was created: queue it to change prices.",
        "rule run",
        PRICING,
        shows=RULE_RUN,
    ),
    "create_request": Action(
        "New request",
        "The registers are asked for the data of the company, unless fresh data are stored.",
        "The request was created.",
        "",
        REQUESTS,
        shows=REQUESTS + "/{id}",
    ),
    "refresh_company": Action(
        "Refresh",
        "The registers are asked again for the company of request {request_id}. Stored data stay until they answer.",
        "The registers are asked again.",
        "request",
        REQUESTS,
    ),
}
