"""Schedules as stored: the columns that the engine needs in `schedules`, the others in `automation_settings`, both
written in one transaction. Deleted schedules are not found any more, but their runs stay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ValidationError

from ecluse.base.errors import EcluseError, InvalidInput, NotFound
from ecluse.base.validation import readable
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_one, fetch_row, fetch_value
from ecluse.engine import Flow, NewSchedule, create_schedule, delete_schedule, load_schedule, update_schedule
from ecluse.flows.audits.configs import resolve_configs
from ecluse.flows.automation.plan import Changes, Plan, changed, cron_of
from ecluse.flows.automation.selection_model import Selection
from ecluse.notify.rules import why_refused
from ecluse.notify.webhook_signature import new_secret, old_name, schedule_secret_name
from ecluse.retention.kinds import Aged

if TYPE_CHECKING:
    from pydantic import SecretStr

    from ecluse.access.secrets import Secrets
    from ecluse.vendors.guarded import GuardedHttp


FLOW = "automation"
SELECTION = "fiche_selection_"
ENGINES = ("name", "timezone", "is_active", "catch_up")  # stored by the engine
APART = (*ENGINES, "fiche_selection", "external_api_key")

LOAD = "SELECT * FROM automation_schedules WHERE id = %s AND tenant_id = %s AND deleted_at IS NULL"
NAMED = "SELECT id FROM automation_schedules WHERE tenant_id = %s AND name = %s AND deleted_at IS NULL"
# Open runs of the schedule need the key until they end.
FORGET_KEY = """
UPDATE automation_settings SET has_external_api_key = false WHERE id = %s AND has_external_api_key
    AND NOT EXISTS (SELECT FROM runs WHERE schedule_id = automation_settings.id AND ended_at IS NULL)
"""
# Condition on a secret `t` of a deleted schedule `s`: no open run of the schedule and no delivery under way needs it.
UNUSED = """s.deleted_at IS NOT NULL AND t.tenant_id = s.tenant_id
    AND t.name IN ('schedule:' || s.id, 'schedule:' || s.id || ':webhook', 'schedule:' || s.id || ':webhook:old')
    AND NOT EXISTS (SELECT FROM runs r WHERE r.schedule_id = s.id AND r.ended_at IS NULL)
    AND NOT EXISTS (SELECT FROM runs r JOIN deliveries d ON d.run_id = r.id
        WHERE r.flow = 'notifications' AND r.ended_at IS NULL AND d.tenant_id = t.tenant_id
          AND t.name IN (d.secret_name, d.secret_name || ':old'))"""
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


def secret_name(schedule_id: int) -> str:
    """Return the name under which a schedule's own CRM key is sealed."""
    return f"schedule:{schedule_id}"


async def create(
    connection: Connection, flow: Flow, tenant: str, plan: Plan, *, secrets: Secrets | None, guard: GuardedHttp
) -> Row:
    """Create a schedule and return its row, with the new secret that signs its webhook as `webhook_secret` (None
    without a webhook). `secrets` seals its API key and secret; `guard` judges its URL. Raises InvalidInput or
    Refused."""
    async with connection.transaction():
        await _check(connection, tenant, plan, guard)
        schedule_id = await create_schedule(connection, _timed(flow, tenant, plan))
        columns = {"id": schedule_id, **_columns(plan)}
        names, marks = ", ".join(columns), ", ".join(f"%({name})s" for name in columns)
        sql = f"INSERT INTO automation_settings ({names}) VALUES ({marks})"  # noqa: S608 - our own names
        await connection.execute(sql, columns)
        if plan.external_api_key is not None:
            await _seal(connection, tenant, schedule_id, plan.external_api_key, secrets)
        secret = None if plan.webhook_url is None else await _sign(connection, tenant, schedule_id, secrets)
        return {**await load(connection, tenant, schedule_id), "webhook_secret": secret}


async def update(
    connection: Connection,
    flow: Flow,
    tenant: str,
    schedule_id: int,
    changes: Changes,
    *,
    secrets: Secrets | None,
    guard: GuardedHttp,
) -> Row:
    """Change a schedule and return its row, as `create` does; `webhook_secret` is set only if the schedule gets its
    first."""
    async with connection.transaction():
        await load_schedule(connection, tenant, schedule_id, lock=True)
        row = await load(connection, tenant, schedule_id)
        try:
            known = plan_of(row)
            plan = Plan.model_validate(changed(known, changes))
        except ValidationError as error:
            raise InvalidInput(readable(error)) from error
        await _check(connection, tenant, plan, guard, known=known)
        await update_schedule(connection, tenant, schedule_id, _timed(flow, tenant, plan))
        columns = _columns(plan)
        sets = ", ".join(f"{name} = %({name})s" for name in columns)
        sql = f"UPDATE automation_settings SET {sets} WHERE id = %(id)s"  # noqa: S608 - our own names
        await connection.execute(sql, {**columns, "id": schedule_id})
        if "external_api_key" in changes.model_fields_set:
            await _seal(connection, tenant, schedule_id, changes.external_api_key, secrets)
        secret = None
        if changes.webhook_url is not None and not await _has_secret(connection, tenant, schedule_id):
            secret = await _sign(connection, tenant, schedule_id, secrets)
        return {**await load(connection, tenant, schedule_id), "webhook_secret": secret}


async def rotate_secret(connection: Connection, tenant: str, schedule_id: int, *, secrets: Secrets | None) -> Row:
    """Replace the secret that signs the schedule's webhook, or create its first, and return the row with it; for a day
    the old one signs as well. Raises Refused if the schedule has no webhook."""
    from ecluse.access.envelope import Refused

    async with connection.transaction():
        await load_schedule(connection, tenant, schedule_id, lock=True)
        row = await load(connection, tenant, schedule_id)
        if row["webhook_url"] is None:
            raise Refused(409, "NO_WEBHOOK", f"Schedule {schedule_id} has no webhook_url: there is nothing to sign.")
        name = schedule_secret_name(schedule_id)
        if secrets is not None and await _has_secret(connection, tenant, schedule_id):
            await secrets.put(connection, tenant, old_name(name), await secrets.get(connection, tenant, name))
        return {**row, "webhook_secret": await _sign(connection, tenant, schedule_id, secrets)}


async def delete(connection: Connection, tenant: str, schedule_id: int) -> None:
    """Delete a schedule. Its runs and slots stay, its name is free again; an open run is not stopped. Raises
    NotFound."""
    async with connection.transaction():
        await load(connection, tenant, schedule_id)
        await delete_schedule(connection, tenant, schedule_id)
        await connection.execute(FORGET_KEY, (schedule_id,))
        await connection.execute(FORGET, (schedule_id,))


async def load(connection: Connection, tenant: str, schedule_id: int) -> Row:
    """Return the row of `automation_schedules`. Raises NotFound, also for a deleted schedule."""
    row = await fetch_one(connection, dict, LOAD, (schedule_id, tenant))
    if row is None:
        raise NotFound(f"there is no automation schedule {schedule_id}")
    return row


async def find(connection: Connection, tenant: str, wanted: str) -> int:
    """Return the id of a schedule, given as id or by name. Raises NotFound for an unknown name."""
    if wanted.isascii() and wanted.isdecimal() and len(wanted) < 19:
        return int(wanted)
    found = await fetch_value(connection, NAMED, (tenant, wanted.strip()))
    if found is None:
        raise NotFound(f"there is no automation schedule {wanted!r}")
    return int(found)


def selection_of(row: Row) -> Selection:
    """Return the selection of a stored schedule."""
    return Selection.model_validate({name: row[SELECTION + name] for name in Selection.model_fields})


def plan_of(row: Row) -> Plan:
    """Return the plan of a stored schedule, without the API key, which is never shown."""
    names = [name for name in Plan.model_fields if name in row]
    return Plan.model_validate({name: row[name] for name in names} | {"fiche_selection": selection_of(row)})


def _timed(flow: Flow, tenant: str, plan: Plan) -> NewSchedule:
    """Return the part of the plan that the engine stores: when the schedule is due."""
    times = (plan.cron_expression, plan.time_of_day, plan.day_of_week, plan.day_of_month)
    return NewSchedule(
        flow,
        plan.name,
        cron_of(plan.schedule_type, *times),
        plan.timezone,
        catch_up=plan.catch_up,
        enabled=plan.is_active,
        tenant_id=tenant,
    )


def _columns(plan: Plan) -> Row:
    """Return the part of the plan that is stored in `automation_settings`."""
    chosen = plan.fiche_selection.model_dump()
    return plan.model_dump(exclude=set(APART)) | {SELECTION + name: value for name, value in chosen.items()}


async def _check(
    connection: Connection, tenant: str, plan: Plan, guard: GuardedHttp, *, known: Plan | None = None
) -> None:
    """Check what a plan cannot validate by itself: webhook and audit configs. Values that are equal in `known` are not
    checked again."""
    url = None if known is not None and plan.webhook_url == known.webhook_url else plan.webhook_url
    if url is not None and (why := why_refused(url, guard)) is not None:
        raise InvalidInput(f"webhook_url: {why}")
    if known is None or plan.specific_audit_configs != known.specific_audit_configs:
        found = await resolve_configs(connection, tenant, plan.specific_audit_configs, use_automatic=False)
        if found.unknown:
            raise InvalidInput(f"specific_audit_configs: there is no audit config {found.unknown[0]}")


async def _has_secret(connection: Connection, tenant: str, schedule_id: int) -> bool:
    """Return True if the schedule has a secret that signs its webhook."""
    return await fetch_row(connection, SIGNED, (tenant, schedule_secret_name(schedule_id))) is not None


async def _sign(connection: Connection, tenant: str, schedule_id: int, secrets: Secrets | None) -> str:
    """Store a new signing secret, and return it for the one response that shows it."""
    if secrets is None:
        raise _no_key("webhook_url: webhooks are signed, and their secrets are kept sealed")
    secret = new_secret()
    await secrets.put(connection, tenant, schedule_secret_name(schedule_id), secret)
    return secret


def _no_key(why: str) -> EcluseError:
    """Return the refusal for want of a key to seal with."""
    from ecluse.access.envelope import Refused

    message = f"{why}, and there is no key here to seal with: set ECLUSE_SECRET_KEY or ECLUSE_SECRET_KEY_FILE."
    return Refused(409, "NO_SECRET_KEY", message)


async def _seal(
    connection: Connection, tenant: str, schedule_id: int, key: SecretStr | None, secrets: Secrets | None
) -> None:
    """Store the schedule's own CRM key sealed, or delete it if `key` is None."""
    from ecluse.access import secrets as sealed

    if key is None:
        await sealed.delete(connection, tenant, secret_name(schedule_id))
    elif secrets is None:
        raise _no_key("external_api_key is kept sealed")
    else:
        await secrets.put(connection, tenant, secret_name(schedule_id), key.get_secret_value())
    await connection.execute(
        "UPDATE automation_settings SET has_external_api_key = %s WHERE id = %s", (key is not None, schedule_id)
    )
