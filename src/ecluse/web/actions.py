"""Actions that pages offer: for each operation that has a form, its button, the sentence that asks for a confirmation
and the one that is shown once it is done. A button is offered only to callers whose role may press it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, urlencode

from fastapi import Request, Response

from ecluse.access.surface import Declared
from ecluse.web.action import Action
from ecluse.web.job_actions import JOB_ACTIONS

DONE = "ecluse_done"  # cookie: what was done; the page that shows it deletes it
DONE_SECONDS = 60
PARAMETER = re.compile(r"\{(\w+)(?::path)?\}")
LONGEST = 200  # characters of a value in a message


class Button(NamedTuple):
    label: str
    address: str
    grave: bool


class Said(NamedTuple):
    text: str
    link: str


SCHEDULES, LANES, AUDITS = "/ui/schedules", "/ui/lanes", "/ui/audits"
CONNECTIONS = "/ui/connections"
PRICING, PROJECTS, RULES = "/ui/pricing", "/ui/pricing/projects", "/ui/pricing/rules"
RULE_RUN = "/ui/pricing/runs/{id}"
REQUESTS = "/ui/requests"
CHANGED = "Schedule {schedule_id} changes for all later runs. Open runs keep what they began with."
DELETED = "Schedule {schedule_id} is deleted, for good. Its runs stay."
FIRED = "A run of schedule {schedule_id} starts now. Its due times stay as they are."

ACTIONS = {
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
        "Paid calls wait, and starts are refused, once this amount is spent. Calls that wait for a budget are tried "
        "again at once.",
        "The budget was set.",
        "",
        LANES,
    ),
    "remove_budget": Action(
        "Delete",
        "Budget {budget_id} is deleted: it limits paid calls no more, and those that wait for it continue.",
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
        "Connection {kind} changes for the calls that follow. A new key is tested first.",
        "The connection was saved.",
        "connection",
        CONNECTIONS,
    ),
    "delete_connection": Action(
        "Delete",
        "Connection {kind} and its key are deleted. Calls that are not sent yet fail.",
        "The connection was deleted.",
        "connection",
        CONNECTIONS,
        leaves=True,
        grave=True,
    ),
    "test_connection": Action(
        "Test", "The vendor is called once with the stored key.", "The connection works.", "connection", CONNECTIONS
    ),
    "create_config": Action(
        "New config", "The config is created, in its first version.", "The config was created.", "", AUDITS
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
        "Project {project_id} changes for the calls that follow. A new token is tested first.",
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
        "{changed} prices change in the shop, exactly as planned. A price that was changed since the preview is left "
        "as it is.",
        "The run was queued.",
        "rule run",
        PRICING,
        shows=RULE_RUN,
        previews=False,
    ),
    "retry_rule_run": Action(
        "Retry failed",
        "{FAILED} failed targets are applied again. Prices that were applied are not touched.",
        "The failed targets are applied again.",
        "rule run",
        PRICING,
        shows=RULE_RUN,
        previews=False,
    ),
    "roll_back_rule_run": Action(
        "Roll back",
        "{APPLIED} applied prices get their former values again in the shop, unless they were changed since.",
        "The rollback was started.",
        "rule run",
        PRICING,
        shows=RULE_RUN,
        previews=False,
        grave=True,
    ),
    "reconcile_rule_run": Action(
        "Reconcile",
        "{APPLIED} applied prices are read from the shop and compared. No price changes.",
        "The reconciliation was started.",
        "rule run",
        PRICING,
        shows=RULE_RUN,
    ),
    "correct_rule_run": Action(
        "Correct mismatches",
        "A new rule run is created, of the prices that the latest reconciliation found changed. No price changes until "
        "that run is queued.",
        "The correcting run was created: queue it to change prices.",
        "rule run",
        PRICING,
        shows=RULE_RUN,
    ),
    "create_request": Action(
        "New request",
        "The registers are asked for the company, unless fresh data of it are stored.",
        "The request was created.",
        "",
        REQUESTS,
        shows=REQUESTS + "/{id}",
    ),
    "refresh_company": Action(
        "Refresh",
        "The registers are asked again for the company of request {request_id}. What is stored stays until then.",
        "The registers are asked again.",
        "request",
        REQUESTS,
    ),
    **JOB_ACTIONS,
}


def buttons(request: Request, *wanted: tuple[str, Mapping[str, Any]], back: str = "", **given: Any) -> list[Button]:
    """Return the buttons of the wanted operations, without those that this server does not have or the caller may not
    do. `wanted`: the name of an operation, and the parameters of its path; `back`: the page to return to; `given`:
    initial values of its form."""
    declared: Mapping[str, Declared] = request.app.state.operations
    return [
        Button(ACTIONS[name].label, address(declared[name].path, name, values, back, given), ACTIONS[name].grave)
        for name, values in wanted
        if name in declared and request.state.caller.may(declared[name].permission)
    ]


def address(path: str, name: str, values: Mapping[str, Any], back: str, given: Mapping[str, Any]) -> str:
    place = "".join(f"/{quote(str(values[one]), safe='')}" for one in parameters(path))
    asked = {"back": back, **given}
    query = urlencode({one: value for one, value in asked.items() if value})
    return f"/ui/do/{name}{place}" + (f"?{query}" if query else "")


def parameters(path: str) -> Sequence[str]:
    return PARAMETER.findall(path)


def keep_said(answer: Response, name: str, values: Mapping[str, Any], follows: str) -> None:
    """Store in a cookie that an operation was done, for the next page: the operation's name and the values for its
    sentence, not the sentence itself."""
    wanted = {one: values[one] for one in PARAMETER.findall(ACTIONS[name].done) if one in values}
    if follows and follows in values:
        wanted["run"] = values[follows]
    kept = urlencode({"did": name, **{one: str(value)[:LONGEST] for one, value in wanted.items()}})
    answer.set_cookie(DONE, kept, max_age=DONE_SECONDS, path="/ui", httponly=True, samesite="strict")


def said(request: Request) -> Said | None:
    """Return the message about the operation that was done just now, from the cookie; None if there is none."""
    kept = dict(parse_qsl(request.cookies.get(DONE, "")))
    if (action := ACTIONS.get(kept.get("did", ""))) is None:
        return None
    run = kept.get("run", "")
    link = f"/ui/runs/{run}" if re.fullmatch(r"[1-9][0-9]{0,18}", run) else ""
    return Said(PARAMETER.sub(lambda found: kept.get(found[1], ""), action.done), link)


def titled(action: Action, values: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """Return the heading of a form: the label of the action, and the kind and name of its record (its id, if it has no
    name)."""
    which = record.get("name") or " ".join(values.values())
    return " ".join(one for one in (action.label, action.what, which) if one)


def in_words(text: str, values: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """Return a sentence with its parameters replaced: by the values of a path, or by counts of the record, such as
    those of targets by status. Of what is not counted there is none."""
    counts = [one.items() for one in record.values() if isinstance(one, Mapping)]
    known = {**{name: count for one in counts for name, count in one}, **values}
    return PARAMETER.sub(lambda found: str(known.get(found[1], "No")), text)
