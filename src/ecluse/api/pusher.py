"""Routes of the Pusher protocol: the WebSocket endpoint for clients, and the HTTP API for publishers, whose requests
are signed with the app's secret instead of an API key."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response, WebSocket
from pydantic import BaseModel, Field, ValidationError
from pydantic_core import from_json

from ecluse.access.envelope import BadCredentials, Refused, as_json
from ecluse.access.limits import BYTES_PER_UNIT, Limiter, cost_of
from ecluse.access.wire import kit_of, number, reads_of, writes_of
from ecluse.api.realtime import realtime_of
from ecluse.base.validation import problem
from ecluse.realtime.apps import App
from ecluse.realtime.channels import NAME
from ecluse.realtime.hub import LONGEST_NAME, Message
from ecluse.realtime.pusher_server import SOCKET_ID
from ecluse.realtime.pusher_signatures import wrong_with
from ecluse.realtime.relay import occupied
from ecluse.realtime.room import NO_KEY

routes = APIRouter(include_in_schema=False)
LARGEST_DATA = 10_240
MOST_CHANNELS = 100
MOST_IN_A_BATCH = 10


class Trigger(BaseModel):
    name: Annotated[str, Field(min_length=1, max_length=LONGEST_NAME, pattern=r"^[^\x00-\x1f\x7f]+$")]
    data: str
    channels: list[str] | None = None
    channel: str | None = None
    socket_id: str | None = None
    info: str | None = None


class Batch(BaseModel):
    batch: Annotated[list[Trigger], Field(max_length=MOST_IN_A_BATCH)]


@routes.websocket("/app/{key}")
async def connect(socket: WebSocket) -> None:
    await socket.app.state.realtime.pusher.serve(socket, writes_of(socket).pool)


@routes.post("/apps/{app_id}/events")
async def trigger(request: Request, app_id: str) -> Response:
    app = await _signed(request, app_id)
    one = _read(Trigger, await request.body())
    message = _message(app, one)
    realtime_of(request).hub.publish(message)
    if not one.info:
        return as_json({})
    counts = await _counts(request, app)
    channels = {name: _shown(counts.get(name, 0), one.info) for name in message.channels}
    return _answer(request, app, {"channels": channels})


@routes.post("/apps/{app_id}/batch_events")
async def trigger_batch(request: Request, app_id: str) -> Response:
    app = await _signed(request, app_id)
    batch = _read(Batch, await request.body()).batch
    messages = [_message(app, one) for one in batch]
    for message in messages:
        realtime_of(request).hub.publish(message)
    if not any(one.info for one in batch):
        return as_json({})
    counts = await _counts(request, app)
    return _answer(request, app, {"batch": [_shown(counts.get(one.channel or "", 0), one.info) for one in batch]})


@routes.get("/apps/{app_id}/channels")
async def list_channels(request: Request, app_id: str, filter_by_prefix: str = "", info: str = "") -> Response:
    app = await _signed(request, app_id)
    counts = await _counts(request, app)
    found = {name: _shown(count, info) for name, count in counts.items() if name.startswith(filter_by_prefix)}
    return _answer(request, app, {"channels": found})


@routes.get("/apps/{app_id}/channels/{channel}")
async def show_channel(request: Request, app_id: str, channel: str, info: str = "") -> Response:
    counts = await _counts(request, await _signed(request, app_id))
    count = counts.get(channel, 0)
    return as_json({"occupied": count > 0, **_shown(count, info)})


@routes.get("/apps/{app_id}/channels/{channel}/users")
async def list_users(request: Request, app_id: str, channel: str) -> Response:
    await _signed(request, app_id)
    raise Refused(400, "NO_PRESENCE", f"Only presence channels have users, and {channel[:200]!r} is not one.")


async def _signed(request: Request, app_id: str) -> App:
    """Return the app that signed the request, which is charged to it. Raise BadCredentials if there is no such app or
    the signature is not valid, Refused if its tenant is disabled, does not use the Pusher server of this process or has
    used up a limit."""
    realtime = realtime_of(request)
    wanted = number("app", app_id)
    if realtime.apps is None:
        raise Refused(403, "REALTIME_OFF", NO_KEY)
    app = await realtime.apps.with_id(writes_of(request).pool, wanted)
    if app is None:
        why = "there is no app with this id, or auth_key is wrong"
        raise BadCredentials(401, "UNAUTHENTICATED", f"The request is not signed by this app: {why}.")
    signed = (request.method, request.url.path, request.query_params.multi_items(), await request.body())
    now = kit_of(request).clock.now().timestamp()
    if (wrong := wrong_with(app.key, app.secret, *signed, now)) is not None:
        raise BadCredentials(401, "UNAUTHENTICATED", f"The request is not signed by this app: {wrong}.")
    if app.disabled:
        raise Refused(403, "TENANT_DISABLED", f"Tenant {app.tenant!r} is disabled.")
    if (why_off := realtime.why_no_sockets(app.tenant)) is not None:
        raise Refused(403, "REALTIME_OFF", why_off)
    limiter, size = _limiter(request), len(await request.body())
    limiter.charge(app, cost_of(request.method, 0) + size // BYTES_PER_UNIT)
    limiter.count_bytes(app, size)
    return app


def _limiter(request: Request) -> Limiter:
    limiter: Limiter = request.app.state.limits
    return limiter


def _answer(request: Request, app: App, value: dict[str, Any]) -> Response:
    """Return the value as JSON, its bytes counted for the limits of the app."""
    answer = as_json(value)
    _limiter(request).count_bytes(app, len(answer.body))
    return answer


async def _counts(request: Request, app: App) -> dict[str, int]:
    return await reads_of(request)(lambda c: occupied(c, app.tenant))


def _shown(count: int, info: str | None) -> dict[str, Any]:
    return {"subscription_count": count} if "subscription_count" in (info or "").split(",") else {}


def _read(shape: type[Any], body: bytes) -> Any:
    try:
        return shape.model_validate(from_json(body), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise Refused(400, "BAD_REQUEST", f"{where}: {problem(first)}") from error
    except ValueError as error:
        raise Refused(400, "NOT_JSON", "The body is not JSON.") from error


def _message(app: App, one: Trigger) -> Message:
    channels = one.channels if one.channels is not None else [one.channel] if one.channel else []
    if not 1 <= len(channels) <= MOST_CHANNELS or not all(NAME.fullmatch(name) for name in channels):
        wanted = "each a name of 1 to 200 letters, digits or characters of -_=@,.;"
        raise Refused(400, "BAD_REQUEST", f"Give 1 to {MOST_CHANNELS} channels, {wanted}")
    if len(one.data.encode()) > LARGEST_DATA:
        raise Refused(413, "BODY_TOO_LARGE", f"The data of an event has at most {LARGEST_DATA} bytes.")
    if one.name.startswith(("pusher:", "pusher_internal:")):
        raise Refused(
            400,
            "BAD_REQUEST",
            "Names of events that begin with `pusher:` or `pusher_internal:` are reserved for the protocol.",
        )
    if one.socket_id is not None and not SOCKET_ID.fullmatch(one.socket_id):
        raise Refused(400, "BAD_REQUEST", "socket_id: must be two numbers with a dot between them")
    return Message(app.tenant, one.name, list(dict.fromkeys(channels)), one.data, not_to=one.socket_id)
