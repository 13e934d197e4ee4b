"""Pricing in the API and on the command line: projects, which are connected shops, and their rules. A shop is called
with its access token before the token is stored, with no transaction open. Tokens are never answered."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import ConfigDict, Field, SecretStr, StringConstraints

from ecluse.access import secrets as sealed
from ecluse.access.listing import Filters, Listing
from ecluse.access.surface import Act, Asked, Command, Look, Noun, Surface
from ecluse.access.wire import Body, Deleted, Shape, number
from ecluse.base.errors import InvalidInput, VendorError
from ecluse.base.validation import fields_of, partial_of
from ecluse.db.query import Row
from ecluse.flows.connections.given import checked_address, key_ends, refused_by_vendor, sealing
from ecluse.flows.pricing import projects, rule_records
from ecluse.flows.pricing.projects import Connector, secret_name
from ecluse.flows.pricing.rules import Terms

surface = Surface("pricing")
READ, WRITE = "pricing.read", "pricing.write"
ONE_PROJECT, ONE_RULE = "/api/pricing/projects/{project_id}", "/api/pricing/rules/{rule_id}"

Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"\S", examples=["Shop in France"])]
Url = Annotated[
    str,
    StringConstraints(strip_whitespace=True, min_length=1, max_length=2_000),
    Field(examples=["https://my-shop.myshopify.com"]),
]
Token = Annotated[SecretStr, Field(min_length=1, max_length=5_000, examples=["shpat_…"])]
RecordId = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,17}$", examples=["3"])]


class NewProject(Body):
    name: Name
    connector: Connector
    base_url: Url = Field(description="The origin of the shop.")
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$", examples=["EUR"])] = Field(
        description="Of all amounts of the project; must be the currency of the shop."
    )
    access_token: Token = Field(description="Sealed, and never shown.")


class ChangedProject(Body):
    """Fields that are left out stay as they are. A new `base_url` needs the `access_token` again: a stored token is
    sent only to the URL that it was given for."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "Shop in Belgium"}]})

    name: Name | None = None
    base_url: Url | None = None
    access_token: Token | None = None


class ProjectRow(Shape):
    id: str = Field(examples=["3"])
    tenant_id: str = Field(examples=["default"])
    name: str
    connector: Connector
    base_url: str
    currency: str
    token_ends: str | None = Field(
        examples=["3f9a"], description="The last characters of the access token; null if it is too short to show any."
    )
    created_by: str
    created_at: datetime
    updated_by: str
    updated_at: datetime


class NewRule(Terms):
    project_id: RecordId
    name: Name = Field(examples=["Summer sale"])


@partial_of(Terms)
class ChangedRule(Body):
    """Changes to a rule: fields that are left out stay as they are; null removes ending, floor and cap."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"ending": "99", "cap": 9900}]})

    name: Name | None = None


@fields_of(Terms)
class RuleRow(Shape):
    id: str = Field(examples=["3"])
    tenant_id: str = Field(examples=["default"])
    project_id: str
    name: str
    version: int
    created_by: str
    created_at: datetime
    updated_by: str
    updated_at: datetime


class RuleFilters(Filters):
    project_id: RecordId | None = None


PROJECTS = Listing("projects", ProjectRow, "pricing_projects", READ, order=("id",), where="t.deleted_at IS NULL")
RULES = Listing(
    "rules", RuleRow, "pricing_rules", READ, filters=RuleFilters, order=("id",), where="t.deleted_at IS NULL"
)
ProjectNumber = Annotated[int, Noun("pricing project")]
RuleNumber = Annotated[int, Noun("pricing rule")]

surface.listing(
    "/api/pricing/projects",
    PROJECTS,
    list_projects="List the connected shops of the tenant, by id; never their access tokens.",
    command=Command(
        "pricing projects list",
        columns=("id", "name", "connector", "base_url", "currency", "token_ends"),
        empty="no projects yet: `ecluse pricing projects create`",
    ),
)
surface.listing(
    "/api/pricing/rules",
    RULES,
    list_rules="List the pricing rules of the tenant, by id.",
    command=Command(
        "pricing rules list",
        columns=("id", "project_id", "version", "name", "ending", "floor", "cap"),
        empty="no rules yet: `ecluse pricing rules create`",
    ),
)


async def _try_new(asked: Asked, body: NewProject) -> str:
    """Return the checked URL, after a call to the shop."""
    sealing(asked)
    url = checked_address(asked, body.base_url)
    await _try(asked, body.connector, url, body.access_token.get_secret_value(), body.currency)
    return url


@surface.operation(
    "POST",
    "/api/pricing/projects",
    needs=WRITE,
    answer=ProjectRow,
    status=201,
    before=_try_new,
    action="pricing_project.create",
    subject="pricing_project:{id}",
    refuses=("NO_SECRET_KEY", "CONNECTION_REFUSED", "NAME_TAKEN"),
    command=Command("pricing projects create", arguments=("name", "connector")),
)
async def create_project(act: Act, body: NewProject) -> Row:
    """Connect a shop, after a call to it with its access token. If the shop refuses, or has another currency, nothing
    is stored."""
    await act.require_room("pricing_projects")
    token = body.access_token.get_secret_value()
    given = {**body.model_dump(exclude={"access_token"}), "base_url": act.before, "token_ends": key_ends(token)}
    row = await projects.create(act.connection, act.tenant, given, act.caller.name)
    await sealing(act).put(act.connection, act.tenant, secret_name(row["id"]), token)
    return row


@surface.read(ONE_PROJECT, needs=READ, answer=ProjectRow, command=Command("pricing projects show"))
async def show_project(look: Look, project_id: ProjectNumber) -> Row:
    """Show one connected shop, without its access token."""
    return await projects.show(look.connection, look.tenant, project_id)


async def _try_changed(asked: Asked, project_id: str, body: ChangedProject) -> Row:
    """Return the project as it was read, after a call to the shop if URL or token change."""
    async with asked.kit.pool.connection() as connection:
        known = await projects.show(connection, asked.tenant, number("pricing project", project_id))
    url = known["base_url"] if body.base_url is None else checked_address(asked, body.base_url)
    if body.access_token is not None:
        sealing(asked)
        await _try(asked, known["connector"], url, body.access_token.get_secret_value(), known["currency"])
    elif url != known["base_url"]:
        raise InvalidInput("access_token: give it again with a new base_url: a token is sent to its own shop only")
    return known


@surface.operation(
    "PATCH",
    ONE_PROJECT,
    needs=WRITE,
    answer=ProjectRow,
    before=_try_changed,
    action="pricing_project.change",
    subject="pricing_project:{project_id}",
    refuses=("NO_SECRET_KEY", "CONNECTION_REFUSED", "NAME_TAKEN", "CONFLICT"),
    command=Command("pricing projects update"),
)
async def change_project(act: Act, project_id: ProjectNumber, body: ChangedProject) -> Row:
    """Change name, URL or access token of a connected shop; a new token is tested first."""
    given = body.model_dump(exclude_none=True, exclude={"access_token"})
    if "base_url" in given:
        given["base_url"] = given["base_url"].rstrip("/")
    if body.access_token is not None:
        token = body.access_token.get_secret_value()
        given["token_ends"] = key_ends(token)
        await sealing(act).put(act.connection, act.tenant, secret_name(project_id), token)
    return await projects.change(act.connection, act.before, given, act.caller.name)


@surface.operation(
    "DELETE",
    ONE_PROJECT,
    needs=WRITE,
    answer=Deleted,
    action="pricing_project.delete",
    subject="pricing_project:{project_id}",
    refuses=("CONFLICT",),
    command=Command("pricing projects delete"),
)
async def delete_project(act: Act, project_id: ProjectNumber) -> Row:
    """Delete a project with its rules and its access token. Its past runs stay."""
    await projects.delete(act.connection, act.tenant, project_id, act.caller.name)
    await sealed.delete(act.connection, act.tenant, secret_name(project_id))
    return {"id": str(project_id), "deleted": True}


@surface.operation(
    "POST",
    "/api/pricing/rules",
    needs=WRITE,
    answer=RuleRow,
    status=201,
    action="pricing_rule.create",
    subject="pricing_rule:{id}",
    refuses=("NAME_TAKEN",),
    command=Command("pricing rules create", arguments=("project_id", "name")),
)
async def create_rule(act: Act, body: NewRule) -> Row:
    """Create a rule of a project. It changes no price until a run of it is queued."""
    await act.require_room("pricing_rules")
    terms = Terms.model_validate(body.model_dump(exclude={"project_id", "name"}))
    return await rule_records.create(
        act.connection, act.tenant, int(body.project_id), body.name, terms, act.caller.name
    )


@surface.read(ONE_RULE, needs=READ, answer=RuleRow, command=Command("pricing rules show"))
async def show_rule(look: Look, rule_id: RuleNumber) -> Row:
    """Show one rule."""
    return await rule_records.show(look.connection, look.tenant, rule_id)


@surface.operation(
    "PATCH",
    ONE_RULE,
    needs=WRITE,
    answer=RuleRow,
    action="pricing_rule.change",
    subject="pricing_rule:{rule_id}",
    refuses=("NAME_TAKEN",),
    command=Command("pricing rules update"),
)
async def change_rule(act: Act, rule_id: RuleNumber, body: ChangedRule) -> Row:
    """Change a rule. What it decides by makes a new version; runs keep the version of their plan."""
    given = body.model_dump(exclude_unset=True)
    nullable = ("ending", "floor", "cap")
    given = {name: value for name, value in given.items() if value is not None or name in nullable}
    return await rule_records.change(act.connection, act.tenant, rule_id, given, act.caller.name)


@surface.operation(
    "DELETE",
    ONE_RULE,
    needs=WRITE,
    answer=Deleted,
    action="pricing_rule.delete",
    subject="pricing_rule:{rule_id}",
    command=Command("pricing rules delete"),
)
async def delete_rule(act: Act, rule_id: RuleNumber) -> Row:
    """Delete a rule. Its past runs stay."""
    await rule_records.delete(act.connection, act.tenant, rule_id, act.caller.name)
    return {"id": str(rule_id), "deleted": True}


async def _try(asked: Asked, connector: str, url: str, token: str, currency: str) -> None:
    """Make a cheap call to a shop. Raise Refused with what the shop, or the way to it, says, and InvalidInput if the
    shop has another currency."""
    networks, now = asked.state.connections.allowed_networks, asked.kit.clock.now
    try:
        async with projects.opened(connector, url, token, currency, allowed_networks=networks, now=now) as shop:
            facts = await shop.facts()
    except VendorError as error:
        raise refused_by_vendor(error) from error
    if facts.currency != currency:
        raise InvalidInput(f"currency: the prices of the shop are in {facts.currency}, not in {currency}")
