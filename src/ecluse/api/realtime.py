"""Routes for realtime clients: where to connect, a new secret for publishers, and authorization to subscribe to a
channel. Subscribing to a channel needs the same permission, scope and tenant as reading the same data by HTTP."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import Form, Request, Response
from pydantic import Field

from ecluse.access import keys
from ecluse.access.commands import Command
from ecluse.access.door import caller_of, needs
from ecluse.access.envelope import Refused, as_json
from ecluse.access.keys import Caller
from ecluse.access.surface import Act, Look, Surface
from ecluse.access.wire import LARGEST_ID, Shape, reads_of, writes_of
from ecluse.base.errors import InvalidInput
from ecluse.base.ids import CUID
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_value
from ecluse.flows.fiches.scopes import check_visible
from ecluse.realtime.apps import app_of, rotate
from ecluse.realtime.channels import PRIVATE, Subject, subject_of
from ecluse.realtime.pusher_server import SOCKET_ID
from ecluse.realtime.pusher_signatures import channel_auth
from ecluse.realtime.room import Realtime

surface = Surface("realtime")
AUTH_PATH, EVENTS_PATH = "/pusher/auth", "/api/events"
RUNS = "SELECT count(*) FROM runs WHERE tenant_id = %s AND id = ANY(%s)"


class RealtimeAccess(Shape):
    enabled: bool
    why_not: str | None = Field(description="Why it is not available, with advice; null if it is.")
    app_id: str | None = Field(examples=["1001"])
    key: str | None = Field(description="The app's public key: the first argument of `new Pusher(…)`.")
    cluster: str | None = Field(description="Cluster of hosted Pusher; null: connect to this server.")
    host: str | None = Field(description="Host of hosted Pusher, if it is not the cluster's.")
    ws_path: str | None = Field(description="Path at which sockets connect to this server.", examples=["/app/5f0c…"])
    auth_endpoint: Literal["/pusher/auth"]
    events_endpoint: Literal["/api/events"]
    private_channels: bool = Field(description="True: `private-fiche-…`, with a permission; false: `fiche-…`, without.")


class RotatedApp(Shape):
    app_id: str = Field(examples=["1001"])
    key: str = Field(description="The app's public key, which does not change.")
    secret: str | None = Field(description="The secret that publishers sign with. Not shown again.")


class ChannelAuth(Shape):
    auth: str = Field(examples=["5f0c…:58df8b0c…"])


def realtime_of(request: Request) -> Realtime:
    realtime: Realtime = request.app.state.realtime
    return realtime


@surface.read("/api/realtime", needs="me.read", narrowed=True, answer=RealtimeAccess, command=Command("realtime show"))
async def show_realtime(look: Look) -> Row:
    """Show what a client needs to connect, with pusher-js or any other client of the Pusher protocol."""
    realtime = realtime_of(look.request)
    why_off, hosted = realtime.why_off(look.tenant), realtime.hosted_for(look.tenant)
    told: dict[str, Any] = {
        "enabled": why_off is None,
        "why_not": why_off,
        "app_id": None,
        "key": None,
        "cluster": hosted and hosted.cluster,
        "host": hosted and hosted.host,
        "ws_path": None,
        "auth_endpoint": AUTH_PATH,
        "events_endpoint": EVENTS_PATH,
        "private_channels": realtime.hub.private,
    }
    if why_off is None and hosted is not None:
        told |= {"app_id": hosted.app_id, "key": hosted.key}
    elif why_off is None and realtime.vault is not None:
        app = await app_of(look.connection, realtime.vault, look.tenant)
        told |= {"app_id": app.app_id, "key": app.key, "ws_path": f"/app/{app.key}"}
    return told


@surface.operation(
    "POST",
    "/api/realtime/rotate",
    needs="keys.write",
    answer=RotatedApp,
    action="realtime.rotate",
    subject="realtime:{app_id}",
    refuses=("REALTIME_OFF",),
    command=Command("realtime rotate"),
)
async def rotate_realtime_secret(act: Act) -> Row:
    """Create a new secret for the tenant's app. Requests signed with the old one are refused within a second; clients
    keep their key and their connections."""
    realtime = realtime_of(act.request)
    if (why_not := realtime.why_no_sockets(act.tenant)) is not None:
        raise Refused(409, "REALTIME_OFF", why_not)
    assert realtime.vault is not None  # noqa: S101 - or it would be off
    app = await rotate(act.connection, realtime.vault, act.tenant)
    act.answers(200, secret=app.secret)
    return {"app_id": app.app_id, "key": app.key, "secret": None}


@surface.routes.post(
    AUTH_PATH, openapi_extra=needs("me.read", narrowed=True, refuses=("REALTIME_OFF",)), response_model=ChannelAuth
)
async def authorise(
    request: Request,
    socket_id: Annotated[str, Form(examples=["1234.5678"])],
    channel_name: Annotated[str, Form(examples=["private-fiche-171234"])],
) -> Response:
    """Sign the subscription of this socket to this private channel, if the caller may read the data published there."""
    realtime, caller = realtime_of(request), caller_of(request)
    if not SOCKET_ID.fullmatch(socket_id):
        raise InvalidInput("socket_id: must be two numbers with a dot between them, as the server gave it")
    subject = subject_of(channel_name) if channel_name.startswith(PRIVATE) else None
    await require_right(request, subject, channel_name)
    if (why_off := realtime.why_off(caller.tenant)) is not None:
        raise Refused(409, "REALTIME_OFF", why_off)
    if (hosted := realtime.hosted_for(caller.tenant)) is not None:
        return as_json({"auth": channel_auth(hosted.key, hosted.secret, socket_id, channel_name)})
    assert realtime.vault is not None  # noqa: S101 - or it would be off
    async with writes_of(request).connection(caller.tenant) as connection:
        app = await app_of(connection, realtime.vault, caller.tenant)
    return as_json({"auth": channel_auth(app.key, app.secret, socket_id, channel_name, caller.key_id)})


async def require_right(request: Request, subject: Subject | None, channel: str) -> None:
    """Raise Refused if `subject` is None or the caller may not read it. `channel`: its name for the message."""
    caller = caller_of(request)
    if subject is None or not await reads_of(request)(lambda c: has_right(c, caller, [subject])):
        raise Refused(403, "FORBIDDEN", f"This key may not listen to {channel[:200]!r}.")


async def has_right(connection: Connection, caller: Caller, subjects: Sequence[Subject]) -> bool:
    """Return True if the caller may read all of these subjects, and the runs among them belong to its tenant."""
    runs = {subject.id for subject in subjects if subject.kind == "run"}
    return not await unreadable(connection, caller, subjects) and await _are_theirs(connection, caller, runs)


async def unreadable(connection: Connection, caller: Caller, subjects: Iterable[Subject]) -> set[Subject]:
    """Return the subjects that the caller lacks the permission or the scope to read. It is not checked whether runs
    belong to its tenant."""
    wanted, whole = set(subjects), caller.scope == "ALL"
    hidden = {subject.id for subject in wanted if subject.kind == "fiche"}
    if hidden and caller.may("transcriptions.read"):
        hidden = set(await check_visible(connection, caller, list(hidden)))
    return {
        one
        for one in wanted
        if (one.id in hidden if one.kind == "fiche" else not (whole and caller.may(permission_of(one))))
    }


def permission_of(subject: Subject) -> str:
    """Return the permission to read a run or a job. The id tells the kind of a job: a number is one of enrichment, a
    CUID one of an agent, any other text one of automation."""
    if subject.kind == "run":
        return "runs.read"
    if subject.id.isdecimal():
        return "requests.read"
    return "jobs.read" if CUID.fullmatch(subject.id) else "automation.read"


async def _are_theirs(connection: Connection, caller: Caller, run_ids: set[str]) -> bool:
    if not all(one.isascii() and one.isdecimal() and 0 < int(one[:30]) <= LARGEST_ID for one in run_ids):
        return False
    wanted = {int(one) for one in run_ids}
    return not wanted or bool(await fetch_value(connection, RUNS, (caller.tenant, list(wanted))) == len(wanted))


async def lost_rights(connection: Connection, joined: Mapping[int, Collection[str]]) -> set[tuple[int, str]]:
    """Return (key id, channel) for the channels in `joined`, given by the id of an API key, that the key may not read
    any more; all channels of a key that was revoked, has expired, or whose tenant is disabled."""
    callers = {one.key_id: one for one in await keys.find_by_ids(connection, list(joined)) if not one.disabled}
    lost = set()
    for key_id, channels in joined.items():
        subjects = {channel: subject for channel in channels if (subject := subject_of(channel)) is not None}
        caller = callers.get(key_id)
        denied = None if caller is None else await unreadable(connection, caller, subjects.values())
        lost |= {(key_id, channel) for channel in channels if denied is None or subjects.get(channel) in denied}
    return lost
