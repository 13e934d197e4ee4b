"""Connected shops in the API and on the command line. A shop is called with its access token before the token is
stored, with no transaction open. Access tokens are never shown."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from ecluse.access.listing import Listing
from ecluse.access.records import RecordRow
from ecluse.access.resource import Resource
from ecluse.access.surface import Act, CallerRequest, Look, Noun, Surface
from ecluse.access.wire import Body, number
from ecluse.base.errors import InvalidInput, VendorError
from ecluse.db.query import Row
from ecluse.flows.connections import projects
from ecluse.flows.connections.given import checked_address, key_ends, refused_by_vendor, sealing
from ecluse.flows.connections.projects import secret_name
from ecluse.flows.connections.surface import Key, Url
from ecluse.vendors.connectors import Connector, opened

surface = Surface("pricing")
READ = "pricing.read"
REFUSES = ("NO_SECRET_KEY", "CONNECTION_REFUSED", "NAME_TAKEN")

Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"\S", examples=["Shop in France"])]


class NewProject(Body):
    name: Name
    connector: Connector
    base_url: Url = Field(examples=["https://my-shop.myshopify.com"], description="The origin of the shop.")
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$", examples=["EUR"])] = Field(
        description="Of all amounts of the project; must be the currency of the shop."
    )
    access_token: Key = Field(examples=["shpat_…"], description="Stored encrypted, never shown.")


class ChangedProject(Body):
    """Fields that are left out stay as they are. A new `base_url` needs the `access_token` again: a stored token is
    sent only to the URL that it was given for."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "Shop in Belgium"}]})

    name: Name | None = None
    base_url: Url | None = None
    access_token: Key | None = None


class ProjectRow(RecordRow):
    connector: Connector
    base_url: str
    currency: str
    token_ends: str | None = Field(
        examples=["3f9a"], description="The last characters of the access token; null if it is too short to show any."
    )


PROJECT = Resource(
    surface, "/api/pricing/projects/{project_id}", "pricing", "pricing_project", "pricing projects", ProjectRow
)
PROJECTS = Listing("projects", ProjectRow, "pricing_projects", READ, order=("id",), where="t.deleted_at IS NULL")
ProjectNumber = Annotated[int, Noun("pricing project")]

PROJECT.lists(
    PROJECTS,
    list_projects="List the connected shops of the tenant, by id; never their access tokens.",
    columns=("id", "name", "connector", "base_url", "currency", "token_ends"),
    empty="no projects yet: `ecluse pricing projects create`",
)


async def _try_new(asked: CallerRequest, body: NewProject) -> str:
    """Call the shop of a new project, and return its checked URL. Raise Refused or InvalidInput if the project cannot
    be stored."""
    sealing(asked)
    url = checked_address(asked, body.base_url)
    await _try(asked, body.connector, url, body.access_token.get_secret_value(), body.currency)
    return url


@PROJECT.creates(refuses=[*REFUSES, "LIMIT_REACHED"], before=_try_new, arguments=("name", "connector"))
async def create_project(act: Act, body: NewProject) -> Row:
    """Connect a shop, after a call to it with its access token. If the shop refuses, or has another currency, nothing
    is stored."""
    await act.require_room("pricing_projects")
    token = body.access_token.get_secret_value()
    given = {**body.model_dump(exclude={"access_token"}), "base_url": act.before, "token_ends": key_ends(token)}
    row = await projects.create(act.connection, act.tenant, given, act.caller.name)
    await sealing(act).put(act.connection, act.tenant, secret_name(row["id"]), token)
    return row


@PROJECT.shows()
async def show_project(look: Look, project_id: ProjectNumber) -> Row:
    """Show one connected shop, without its access token."""
    return await projects.show(look.connection, look.tenant, project_id)


async def _try_changed(asked: CallerRequest, project_id: str, body: ChangedProject) -> Row:
    """Return the project as it was read; if a new token is given, call the shop with it first. Raise InvalidInput if
    the URL changes without a token."""
    async with asked.kit.pool.connection() as connection:
        known = await projects.show(connection, asked.tenant, number("pricing project", project_id))
    url = known["base_url"] if body.base_url is None else checked_address(asked, body.base_url)
    if body.access_token is not None:
        sealing(asked)
        await _try(asked, known["connector"], url, body.access_token.get_secret_value(), known["currency"])
    elif url != known["base_url"]:
        raise InvalidInput("access_token: give it again with a new base_url: a token is sent to its own shop only")
    return known


@PROJECT.changes(refuses=[*REFUSES, "CONFLICT"], before=_try_changed)
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


async def _try(asked: CallerRequest, connector: str, url: str, token: str, currency: str) -> None:
    """Make a cheap call to a shop. Raise Refused with the error of the shop or of the connection to it, InvalidInput if
    the shop has another currency."""
    networks, now = asked.state.connections.allowed_networks, asked.kit.clock.now
    try:
        async with opened(connector, url, token, currency, allowed_networks=networks, now=now) as shop:
            facts = await shop.facts()
    except VendorError as error:
        raise refused_by_vendor(error) from error
    if facts.currency != currency:
        raise InvalidInput(f"currency: the prices of the shop are in {facts.currency}, not in {currency}")
