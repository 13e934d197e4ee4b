"""Storage of automation schedules: the engine's columns in `schedules`, their plans in `automation_settings`, both
written in one transaction. Deleted schedules are not found any more, but their runs stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ecluse.base.errors import Conflict, InvalidInput, NotFound
from ecluse.base.masking import origin_of
from ecluse.base.validation import readable
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_all, fetch_one, fetch_row, fetch_value
from ecluse.engine import (
    Fired,
    Flow,
    NewSchedule,
    Plans,
    change_planned,
    create_planned,
    delete_planned,
    load_schedule,
    parsed,
)
from ecluse.flows.audits.configs import resolve_configs
from ecluse.flows.automation.config import Config
from ecluse.flows.automation.plan import Changes, Plan, Work, WorkChanges, changed, times_of
from ecluse.flows.automation.queries import with_fiche_ids
from ecluse.flows.automation.selection_model import Selection, kinds_needed
from ecluse.flows.connections import lanes
from ecluse.flows.connections import records as connections
from ecluse.flows.connections.records import Kind, schedule_crm_key_name
from ecluse.notify import confirmation_requests
from ecluse.notify.rules import why_refused
from ecluse.notify.webhook_signature import new_secret, old_name, schedule_url_name, schedule_webhook_secret_name
from ecluse.retention.kinds import Aged

if TYPE_CHECKING:
    from pydantic import SecretStr

    from ecluse.access.secrets import Secrets
    from ecluse.vendors.guarded import GuardedHttp


FLOW = "automation"
SELECTION = "fiche_selection_"
APART = {"fiche_selection", "external_api_key"}  # of a plan: not columns of the same name

LOAD = "SELECT * FROM automation_schedules WHERE id = %s AND tenant_id = %s AND deleted_at IS NULL"
SHOWN = "SELECT * FROM automation_schedule_list WHERE id = %s"
# Open runs of the schedule need the key until they end.
FORGET_KEY = """
UPDATE automation_settings SET has_external_api_key = false WHERE id = %s AND has_external_api_key
    AND NOT EXISTS (SELECT FROM runs WHERE schedule_id = automation_settings.id AND ended_at IS NULL)
"""
# Condition on a secret `t` of a deleted schedule `s`: no open run of the schedule and no delivery under way needs it.
UNUSED = """s.deleted_at IS NOT NULL AND t.tenant_id = s.tenant_id
    AND t.name IN ('schedule:' || s.id, 'schedule:' || s.id || ':webhook', 'schedule:' || s.id || ':webhook:old',
                   'schedule:' || s.id || ':webhook:url')
    AND NOT EXISTS (SELECT FROM runs r WHERE r.schedule_id = s.id AND r.ended_at IS NULL)
    AND NOT EXISTS (SELECT FROM runs r JOIN deliveries d ON d.run_id = r.id
        WHERE r.flow = 'notifications' AND r.ended_at IS NULL AND d.tenant_id = t.tenant_id
          AND t.name IN (d.secret_name, d.secret_name || ':old', d.url_name))"""
FORGET = f"DELETE FROM secrets t USING schedules s WHERE s.id = %s AND {UNUSED}"  # noqa: S608 - our own words
# For retention: secrets that a run or a delivery still needed when their schedule was deleted.
KEPT = Aged(
    "secrets",
    "secrets",
    "t.updated_at",
    order="updated_at",
    type="timestamptz",
    where="starts_with(t.name, 'schedule:')",
    also=f"EXISTS (SELECT FROM schedules s WHERE {UNUSED})",
)
SIGNED = "SELECT FROM secrets WHERE tenant_id = %s AND name = %s"


@dataclass(frozen=True)
class AutomationPlans(Plans):
    """Storage of the plans of automation schedules. Without `secrets`, no schedule can have an API key of its own or a
    webhook; without `guard`, webhooks may lead to public addresses only."""

    config: Config = field(default_factory=Config)
    secrets: Secrets | None = None
    guard: GuardedHttp | None = None

    def changed(self, flow: Flow, known: Plan, given: Mapping[str, Any]) -> Plan:  # noqa: ARG002 - as declared
        return parsed(Plan, changed(known, parsed(WorkChanges, given)))

    def names_addresses(self, given: Mapping[str, Any]) -> bool:
        return bool({"notify_emails", "notifyEmails"} & given.keys())

    def input(self, plan: Work) -> Row:  # noqa: ARG002 - a run reads the plan when it begins
        return {}

    async def load(self, connection: Connection, row: Row) -> Plan:
        try:
            return plan_of(await load(connection, row["tenant_id"], row["id"]))
        except ValidationError as error:  # changed in the database, by hand
            raise InvalidInput(readable(error)) from error

    async def shown(self, connection: Connection, row: Row) -> Row:
        (found,) = await fetch_all(connection, dict, SHOWN, (row["id"],))
        return {name: value for name, value in with_fiche_ids(found).items() if name in Work.model_fields}

    async def save(
        self, connection: Connection, schedule_id: int, new: NewSchedule, plan: Work, known: Plan | None
    ) -> Row:
        await self._check(connection, new.tenant_id, plan, known)
        columns = {"id": schedule_id, **times_of(plan, new.cron), **_columns(plan)}
        names, marks = ", ".join(columns), ", ".join(f"%({name})s" for name in columns)
        sets = ", ".join(f"{name} = excluded.{name}" for name in columns)
        await connection.execute(
            f"INSERT INTO automation_settings ({names}) VALUES ({marks})"  # noqa: S608 - our own names
            f" ON CONFLICT (id) DO UPDATE SET {sets}",
            columns,
        )
        if "external_api_key" in plan.model_fields_set:
            await _seal(connection, new.tenant_id, schedule_id, plan.external_api_key, self.secrets)
        await confirmation_requests.ask(connection, new.tenant_id, plan.notify_emails)
        before = None if known is None else known.webhook_url
        if plan.webhook_url == before:
            return {"webhook_secret": None}
        await _seal_url(connection, new.tenant_id, schedule_id, plan.webhook_url, self.secrets)
        if plan.webhook_url is None or await _has_secret(connection, new.tenant_id, schedule_id):
            return {"webhook_secret": None}
        return {"webhook_secret": await _sign(connection, new.tenant_id, schedule_id, self.secrets)}

    async def check_enabled(self, connection: Connection, tenant_id: str, plan: Work) -> None:
        """Raise Conflict if the tenant lacks a connection that the runs need: they would fail night after night."""
        needed = kinds_needed(plan.run_transcription, plan.run_audits)
        await connections.require(connection, [(tenant_id, kind) for kind in needed])

    async def forget(self, connection: Connection, schedule_id: int) -> None:
        tenant = await fetch_value(connection, "SELECT tenant_id FROM schedules WHERE id = %s", (schedule_id,))
        await lanes.retire(connection, "crm", tenant, lanes.of_schedule(schedule_id))
        await connection.execute(FORGET_KEY, (schedule_id,))
        await connection.execute(FORGET, (schedule_id,))

    async def fire(
        self, connection: Connection, flow: Flow, row: Row, instead: Mapping[str, Any] | None, correlation_id: str
    ) -> Fired:
        from ecluse.flows.automation import start

        which, override = (row["tenant_id"], row["id"]), start.override_of(instead)
        return await start.fire(connection, flow, *which, override, self.config, correlation_id)

    async def _check(self, connection: Connection, tenant: str, plan: Work, known: Plan | None) -> None:
        """Raise InvalidInput if the webhook URL is not allowed or a named audit config does not exist, which the model
        of a plan cannot validate by itself. Values that have not changed are not checked again."""
        from ecluse.vendors.guarded import GuardedHttp  # most commands do not need it

        url = None if known is not None and plan.webhook_url == known.webhook_url else plan.webhook_url
        if url is not None and (why := why_refused(url, self.guard or GuardedHttp(()))) is not None:
            raise InvalidInput(f"webhook_url: {why}")
        if known is None or plan.specific_audit_configs != known.specific_audit_configs:
            found = await resolve_configs(connection, tenant, plan.specific_audit_configs, use_automatic=False)
            if found.unknown:
                raise InvalidInput(f"specific_audit_configs: there is no audit config {found.unknown[0]}")


async def create(connection: Connection, flow: Flow, tenant: str, plan: Plan, **means: Any) -> Row:
    """Create a schedule from a `Plan`. Return its row, with the signing secret of its webhook in `webhook_secret` (None
    without a webhook). `means`: fields of an `AutomationPlans` to use in place of the flow's own."""
    async with connection.transaction():
        made = await create_planned(connection, NewSchedule(_able(flow, means), **_timed(plan), tenant_id=tenant), plan)
        return {**await load(connection, tenant, made.id), **made.once}


async def update(
    connection: Connection, flow: Flow, tenant: str, schedule_id: int, changes: Changes, **means: Any
) -> Row:
    """Change a schedule. Return its row, with a new signing secret in `webhook_secret` if one was made. Raise NotFound
    if the tenant has no such schedule, InvalidInput if the changed schedule is not valid. `means` as in `create`."""

    def changing(_: Row, known: Plan) -> tuple[Row, Plan]:
        try:
            plan = Plan.model_validate(changed(known, changes))
        except ValidationError as error:
            raise InvalidInput(readable(error)) from error
        return _timed(plan), plan

    async with connection.transaction():
        once = await change_planned(connection, _able(flow, means), tenant, schedule_id, changing)
        return {**await load(connection, tenant, schedule_id), **once}


async def rotate_secret(connection: Connection, tenant: str, schedule_id: int, *, secrets: Secrets | None) -> Row:
    """Store a new secret that signs the schedule's webhook, or the first one, and return the schedule with it in
    `webhook_secret`; for a day the old secret signs as well. Raise Conflict if the schedule has no webhook, or this
    server no encryption key."""
    async with connection.transaction():
        await load_schedule(connection, tenant, schedule_id, lock=True)
        row = await load(connection, tenant, schedule_id)
        if row["webhook_url"] is None:
            why = f"Schedule {schedule_id} has no webhook_url: there is nothing to sign."
            raise Conflict(why, code="NO_WEBHOOK")
        name = schedule_webhook_secret_name(schedule_id)
        if secrets is not None and await _has_secret(connection, tenant, schedule_id):
            await secrets.put(connection, tenant, old_name(name), await secrets.get(connection, tenant, name))
        return {**row, "webhook_secret": await _sign(connection, tenant, schedule_id, secrets)}


async def delete(connection: Connection, tenant: str, schedule_id: int) -> None:
    """Delete an automation schedule; raise NotFound if the tenant has no such one. Its runs stay."""
    async with connection.transaction():
        await load(connection, tenant, schedule_id)  # raises NotFound for a schedule of another flow
        await delete_planned(connection, AutomationPlans(), tenant, schedule_id)


async def load(connection: Connection, tenant: str, schedule_id: int) -> Row:
    """Return the row of `automation_schedules`; raise NotFound if there is no such schedule, or it was deleted."""
    row = await fetch_one(connection, dict, LOAD, (schedule_id, tenant))
    if row is None:
        raise NotFound(f"There is no automation schedule {schedule_id}.")
    return row


def selection_of(row: Row) -> Selection:
    """Return the selection of a stored schedule."""
    return Selection.model_validate({name: row[SELECTION + name] for name in Selection.model_fields})


def kinds_of(row: Row) -> list[Kind]:
    """Return the kinds of connections that the runs of a stored schedule need."""
    return kinds_needed(row["run_transcription"], row["run_audits"])


def plan_of(row: Row) -> Plan:
    """Return the plan of a stored schedule, without the API key, which is never shown."""
    names = [name for name in Plan.model_fields if name in row]
    return Plan.model_validate({name: row[name] for name in names} | {"fiche_selection": selection_of(row)})


def _able(flow: Flow, means: Mapping[str, Any]) -> Flow:
    """Return the flow with plans made of `means`, or unchanged without any."""
    return replace(flow, plans=AutomationPlans(**means)) if means else flow


def _timed(plan: Plan) -> Row:
    """Return the engine's columns of a schedule with this plan."""
    same = {"name": plan.name, "timezone": plan.timezone, "catch_up": plan.catch_up}
    return {**same, "cron": plan.cron, "enabled": plan.is_active}


def _columns(plan: Work) -> Row:
    """Return the columns of `automation_settings` for a plan, except its times and API key. Of the webhook URL only the
    origin is stored in the column."""
    chosen = plan.fiche_selection.model_dump()
    own = plan.model_dump(include=set(Work.model_fields) - APART)
    own["webhook_url"] = None if plan.webhook_url is None else origin_of(plan.webhook_url)
    return own | {SELECTION + name: value for name, value in chosen.items()}


async def _has_secret(connection: Connection, tenant: str, schedule_id: int) -> bool:
    """Return True if the schedule has a secret that signs its webhook."""
    return await fetch_row(connection, SIGNED, (tenant, schedule_webhook_secret_name(schedule_id))) is not None


async def _seal_url(
    connection: Connection, tenant: str, schedule_id: int, url: str | None, secrets: Secrets | None
) -> None:
    """Store the URL of the schedule's webhook encrypted, or delete the stored one if `url` is None. Raise Conflict if
    this server has no encryption key."""
    from ecluse.access import secrets as sealed

    if url is None:
        await sealed.delete(connection, tenant, schedule_url_name(schedule_id))
    elif secrets is None:
        raise _no_key("webhook_url", "it")
    else:
        await secrets.put(connection, tenant, schedule_url_name(schedule_id), url)


async def _sign(connection: Connection, tenant: str, schedule_id: int, secrets: Secrets | None) -> str:
    """Store a new signing secret for the schedule's webhook, and return it for the one response that shows it. Raise
    Conflict if this server has no encryption key."""
    if secrets is None:
        raise _no_key("webhook_url", "its signing secret")
    secret = new_secret()
    await secrets.put(connection, tenant, schedule_webhook_secret_name(schedule_id), secret)
    return secret


def _no_key(field: str, what: str) -> Conflict:
    remedy = "set ECLUSE_SECRET_KEY or ECLUSE_SECRET_KEY_FILE"
    message = f"{field}: this server has no encryption key, so {what} cannot be stored: {remedy}."
    return Conflict(message, code="NO_SECRET_KEY")


async def _seal(
    connection: Connection, tenant: str, schedule_id: int, key: SecretStr | None, secrets: Secrets | None
) -> None:
    """Store the schedule's own CRM key encrypted, or delete it and its lane if `key` is None. Raise Conflict if this
    server has no encryption key."""
    from ecluse.access import secrets as sealed

    if key is None:
        await sealed.delete(connection, tenant, schedule_crm_key_name(schedule_id))
        await lanes.retire(connection, "crm", tenant, lanes.of_schedule(schedule_id))
    elif secrets is None:
        raise _no_key("external_api_key", "it")
    else:
        await secrets.put(connection, tenant, schedule_crm_key_name(schedule_id), key.get_secret_value())
    await connection.execute(
        "UPDATE automation_settings SET has_external_api_key = %s WHERE id = %s", (key is not None, schedule_id)
    )
