"""Routes of API keys of the caller's tenant, and of tenants, which an admin of the tenant `default` administers."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from ecluse.access import keys, tenants
from ecluse.access.commands import Command
from ecluse.access.envelope import Refused
from ecluse.access.listing import Filters, Listing
from ecluse.access.permissions import ROLES
from ecluse.access.surface import Act, Look, Noun, Surface
from ecluse.access.wire import Body, Shape
from ecluse.api.shapes import Id, Reason, Role
from ecluse.base.errors import Conflict
from ecluse.base.validation import form
from ecluse.db.query import Row, fetch_one, fetch_value
from ecluse.engine.work.completion import end_all_by_operator
from ecluse.flows.jobs.states import cancel_all

surface = Surface("access")

Scope = Literal["ALL", "GROUP", "SELF"]
KeyState = Literal["valid", "expired", "revoked"]
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"\S", examples=["nightly export"])]


class KeyRow(Shape):
    id: Id
    tenant_id: str
    name: str
    hint: str = Field(description="The first characters of the key.", examples=["ecl_x1Yz"])
    role: Role
    scope: Scope
    groupes: list[str]
    crm_user_id: str | None
    state: KeyState
    created_at: datetime
    expires_at: datetime | None
    last_used_at: datetime | None
    revoked_at: datetime | None


class CreatedKey(KeyRow):
    key: str | None = Field(None, description="The key itself: in the first answer only, and stored nowhere.")


class NewKey(Body):
    name: Name = Field(description="The person or program that uses it.")
    role: Role = Field(description="A viewer reads, an operator also acts, an admin also administers.")
    expires_in: str | None = Field(
        None,
        pattern=form(f"^({keys.LIFETIME}|{keys.NEVER})$", f"such as 90m, 12h or 30d, or {keys.NEVER}"),
        examples=["30d"],
        description="Such as 90m, 12h or 30d, or `never`. null: as `ECLUSE_KEY_LIFETIME_DAYS` says, by default a year.",
    )
    scope: Scope = Field("ALL", description="Readable fiches: all, those of groupes, or those of one CRM user.")
    groupes: list[Annotated[str, Field(min_length=1, max_length=200)]] = Field([], max_length=100)
    crm_user_id: str | None = Field(None, min_length=1, max_length=200)


class RevokedKey(Shape):
    id: Id
    revoked: Literal[True]


class TenantRow(Shape):
    id: str = Field(examples=["acme"])
    name: str
    created_at: datetime
    disabled_at: datetime | None
    keys: int = Field(description="Number of valid keys: not revoked, not expired.")


class NewTenant(Body):
    id: str = Field(
        pattern=form(r"^[A-Za-z0-9._-]{1,100}$", "up to 100 letters, digits, dots, underscores and hyphens"),
        examples=["acme"],
    )
    name: Name | None = Field(None, description="Display name; null: the id is used.")


class DisableTenant(Reason):
    stop: bool = Field(False, description="Also end its open runs and jobs, as an operator does: they are cancelled.")


class DisablePreview(Shape):
    id: str = Field(examples=["acme"])
    disabled_at: datetime | None
    open_runs: int = Field(description="Runs that go on, or are cancelled with `stop`.")
    open_jobs: int = Field(description="Jobs that wait or that agents execute; `stop` cancels them.")
    calls_in_flight: int = Field(description="Calls in flight; paid ones finish, and their results are stored.")


class DisabledTenant(TenantRow):
    ended_runs: int = Field(description="Runs that `stop` has ended.")
    ended_jobs: int = Field(description="Jobs that `stop` has cancelled; agents stop theirs within a lease.")
    open_runs: int = Field(description="Runs that go on.")


class EnableTenant(Body):
    reason: str | None = Field(None, min_length=1, max_length=2000, examples=["the contract is back"])


class KeyFilters(Filters):
    state: KeyState | None = None
    role: Role | None = None


def administrators_only(look: Look) -> None:
    """Raise Refused unless the caller has an admin key of the tenant `default` with scope ALL."""
    if not look.caller.administers_tenants:
        raise Refused(403, "FORBIDDEN", f"Only an admin key of the tenant {tenants.DEFAULT} may do this.")


async def check_administrator(look: Look) -> None:
    administrators_only(look)


KEYS = Listing("keys", KeyRow, "key_list", "keys.read", filters=KeyFilters, order=("id",))
TENANTS_WITH_KEYS = """(
SELECT id, name, created_at, disabled_at,
       (SELECT count(*)::int FROM key_list k WHERE k.tenant_id = t.id AND k.state = 'valid') AS keys FROM tenants t)"""
TENANTS = Listing("tenants", TenantRow, TENANTS_WITH_KEYS, "tenants.read", order=("id",), every_tenant=True)
ONE_KEY = f"SELECT {', '.join(KeyRow.model_fields)} FROM key_list WHERE id = %s"  # noqa: S608 - our own names
ONE_TENANT = f"SELECT * FROM {TENANTS_WITH_KEYS} t WHERE id = %s"  # noqa: S608 - our own names
OPEN_RUNS = "SELECT count(*)::int FROM runs WHERE tenant_id = %s AND ended_at IS NULL"
DISABLING = """
WITH open AS MATERIALIZED (SELECT id FROM runs WHERE tenant_id = %(tenant)s AND ended_at IS NULL),
calls AS (  -- a claim without a lane holds items of another claim's calls
    SELECT sum(c.in_flight) AS count FROM claims c JOIN open ON open.id = c.run_id
    WHERE c.in_flight > 0 AND c.lane_id IS NOT NULL)
SELECT id, disabled_at, (SELECT count(*) FROM open)::int AS open_runs,
       (SELECT count(*)::int FROM jobs WHERE tenant_id = %(tenant)s AND ended_at IS NULL) AS open_jobs,
       coalesce((SELECT count FROM calls), 0)::int AS calls_in_flight
FROM tenants WHERE id = %(tenant)s
"""

surface.listing(
    "/api/keys",
    KEYS,
    list_keys="List the keys of the tenant, by id; never the keys themselves.",
    command=Command(
        "keys list", columns=("id", "hint", "role", "state", "expires_at", "last_used_at", "scope", "name")
    ),
)
surface.listing(
    "/api/tenants",
    TENANTS,
    check=check_administrator,
    list_tenants="List all tenants. Only for admins of the tenant `default`.",
    command=Command("tenants list"),
)


@surface.operation(
    "POST",
    "/api/keys",
    needs="keys.write",
    answer=CreatedKey,
    status=201,
    action="key.create",
    subject="key:{id}",
    refuses=("LIMIT_REACHED",),
    command=Command("keys create", arguments=("name",), example="ecluse keys create 'nightly export' --role viewer"),
)
async def create_key(act: Act, body: NewKey) -> Row:
    """Create a key of this tenant, with no more permissions than the caller's. Only this answer shows the key."""
    if not ROLES[body.role] <= ROLES[act.caller.role]:
        raise Refused(403, "FORBIDDEN", f"A key of role {act.caller.role} may not create a key of role {body.role}.")
    await act.require_room("api_keys")
    key_id, key = await keys.create(
        act.connection,
        act.tenant,
        body.role,
        body.name,
        expires_in=act.state.key_lifetime if body.expires_in is None else keys.lifetime(body.expires_in),
        scope=body.scope,
        groupes=body.groupes,
        crm_user_id=body.crm_user_id,
    )
    act.answers(201, key=key)
    return await fetch_one(act.connection, dict, ONE_KEY, (key_id,)) or {}


@surface.operation(
    "DELETE",
    "/api/keys/{key_id}",
    needs="keys.write",
    answer=RevokedKey,
    action="key.revoke",
    subject="key:{key_id}",
    refuses=("CONFLICT",),
    command=Command("keys revoke"),
)
async def revoke_key(act: Act, key_id: Annotated[int, Noun("key")]) -> Row:
    """Revoke a key for good: it is refused within about a second. A key cannot revoke itself: use another key."""
    if key_id == act.caller.key_id:
        raise Conflict("This request is made with the key that it would revoke: use another key.")
    if not (await keys.revoke(act.connection, key_id, of_tenant=act.tenant))[1]:
        act.changes_nothing()
    return {"id": str(key_id), "revoked": True}


@surface.operation(
    "POST",
    "/api/tenants",
    needs="tenants.write",
    answer=TenantRow,
    status=201,
    action="tenant.create",
    subject="tenant:{id}",
    refuses=("CONFLICT",),
    command=Command("tenants create", arguments=("id",)),
)
async def create_tenant(act: Act, body: NewTenant) -> Row:
    """Create a tenant. Its first key is created with the header `Ecluse-Tenant`."""
    administrators_only(act)
    if not await tenants.create(act.connection, body.id, body.name):
        raise Conflict(f"Tenant {body.id!r} exists already.")
    return await _tenant(act, body.id)


@surface.read("/api/tenants/{tenant}/disable", needs="tenants.read", answer=DisablePreview)
async def preview_disable_of_tenant(look: Look, tenant: str) -> Row:
    """Preview the disabling of a tenant: the number of its open runs and jobs, which `stop` would end, and of its
    calls in flight. Nothing is changed."""
    administrators_only(look)
    await tenants.require(look.connection, tenant)
    return await fetch_one(look.connection, dict, DISABLING, {"tenant": tenant}) or {}


@surface.operation(
    "POST",
    "/api/tenants/{tenant}/disable",
    needs="tenants.write",
    answer=DisabledTenant,
    action="tenant.disable",
    subject="tenant:{tenant}",
    refuses=("CONFLICT",),
    command=Command("tenants disable", preview="preview_disable_of_tenant"),
)
async def disable_tenant(act: Act, tenant: str, body: DisableTenant) -> Row:
    """Disable a tenant: its keys are refused within about a second; admins of the tenant `default` can still read it.
    Its open runs go on; with `stop` they and its jobs are cancelled, in the name of the caller's key and with this
    reason."""
    administrators_only(act)
    if tenant == act.tenant:
        raise Conflict(
            f"Tenant {tenant} cannot be disabled: the key of this request belongs to it, and would be refused."
        )
    changed = await tenants.set_disabled(act.connection, tenant, True)
    ended, jobs = 0, 0
    if body.stop:
        jobs = await cancel_all(act.connection, tenant, act.caller.name)
        ended = await end_all_by_operator(act.connection, act.kit.by_name, tenant, body.reason, by=act.caller.name)
    if not changed and not ended and not jobs:
        act.changes_nothing()
    left = await fetch_value(act.connection, OPEN_RUNS, (tenant,))
    return {**await _tenant(act, tenant), "ended_runs": ended, "ended_jobs": jobs, "open_runs": left}


@surface.operation(
    "POST",
    "/api/tenants/{tenant}/enable",
    needs="tenants.write",
    answer=TenantRow,
    action="tenant.enable",
    subject="tenant:{tenant}",
    command=Command("tenants enable"),
)
async def enable_tenant(act: Act, tenant: str, body: EnableTenant) -> Row:  # noqa: ARG001 - as above
    """Enable a tenant: its keys are accepted again."""
    administrators_only(act)
    if not await tenants.set_disabled(act.connection, tenant, False):
        act.changes_nothing()
    return await _tenant(act, tenant)


async def _tenant(act: Act, tenant: str) -> Row:
    return await fetch_one(act.connection, dict, ONE_TENANT, (tenant,)) or {}
