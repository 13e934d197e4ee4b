"""WebSocket server for the Pusher protocol, version 7, at `/app/{key}`. Works with an unmodified pusher-js.

A socket belongs to the tenant of the app key it connected with, and gets no events of other tenants. A private channel
needs a signature over the socket's id, which `/pusher/auth` issues to callers that may read the same record by HTTP.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg
import structlog
from pydantic_core import from_json
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketDisconnected

from ecluse.base.tasks import stopped
from ecluse.db.connect import Pool
from ecluse.db.outage import is_unavailable, one_line
from ecluse.realtime.apps import KEY, App, Apps
from ecluse.realtime.channels import NAME, PRIVATE, encoded, subject_of
from ecluse.realtime.hub import DISABLED, LONGEST_NAME, TOO_SLOW, Hub, Listener, Message, frame
from ecluse.realtime.limits import Limits
from ecluse.realtime.pusher_signatures import Grant, granted

log = structlog.get_logger(__name__)

SOCKET_ID = re.compile(r"\d{1,12}\.\d{1,12}", re.ASCII)
SPOKEN = {"5", "6", "7"}
UNKNOWN_APP = (4001, "There is no app with this key")
OVER_QUOTA = (4004, "Too many connections")
NOT_SPOKEN = (4007, "This protocol version is not supported: use 7")
NO_VERSION = (4008, "No protocol version was given")
NOT_NOW = (4100, "The database is unavailable: try again")
NO_PONG = (4201, "No answer to a ping")
TOO_LARGE = (1009, "A message is too large")
CLOSE_SECONDS = 1.0
REFUSED_PREFIXES = ("presence-", "private-encrypted-")


class PusherServer:
    """WebSocket server of this process: admits sockets and serves them. `why_off` returns the reason why a tenant
    cannot use sockets here; None if it can."""

    def __init__(self, hub: Hub, apps: Apps | None, why_off: Callable[[str], str | None], limits: Limits) -> None:
        self._hub, self._apps, self._why_off, self.limits = hub, apps, why_off, limits

    def sockets(self, tenant: str) -> int:
        """Return the number of open sockets of the tenant."""
        return sum((one.tenant, one.transport) == (tenant, "websocket") for one in self._hub.listeners)

    def full(self, tenant: str) -> bool:
        """Return True if the tenant has as many open sockets as allowed."""
        return 0 < self.limits.sockets <= self.sockets(tenant)

    async def serve(self, socket: WebSocket, pool: Pool) -> None:
        """Accept a socket and serve it until it ends; refuse it with a close code if it may not connect."""
        await socket.accept()
        with suppress(WebSocketDisconnect, WebSocketDisconnected):  # the client disconnected first
            app = await self._admitted(socket, pool)
            if isinstance(app, App):
                connection = Connection(self._hub, app, socket, self.limits)
                code, why = await connection.run()
            else:
                code, why = app
                await socket.send_text(_error(code, why))
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await socket.close(code, why)

    async def _admitted(self, socket: WebSocket, pool: Pool) -> App | tuple[int, str]:
        """Return the app of a socket that may connect; otherwise the close code and reason."""
        version = socket.query_params.get("protocol")
        if version not in SPOKEN:
            return NOT_SPOKEN if version else NO_VERSION
        if self._apps is None:
            return DISABLED
        if not KEY.fullmatch(key := socket.path_params["key"]):
            return UNKNOWN_APP
        try:
            app = await self._apps.with_key(pool, key)
        except psycopg.Error as error:
            if not is_unavailable(error):
                raise
            log.warning("realtime: socket refused, database unavailable", error=one_line(error))
            return NOT_NOW
        if app is None:
            return UNKNOWN_APP
        if app.disabled or self._why_off(app.tenant) is not None:
            return DISABLED
        return OVER_QUOTA if self.full(app.tenant) else app


class Connection:
    """The connection of one socket. Only its writer sends: events and replies go through one queue, in order."""

    def __init__(self, hub: Hub, app: App, socket: WebSocket, limits: Limits) -> None:
        self._hub, self._app, self._socket, self._limits = hub, app, socket, limits
        self.id = f"{secrets.randbelow(10**10)}.{secrets.randbelow(10**10)}"
        self._listener = Listener(app.tenant, "websocket", self.id)
        self._now = asyncio.get_running_loop().time
        self._heard_at = self._now()
        self._client_events: Counter[int] = Counter()  # by second

    async def run(self) -> tuple[int, str]:
        """Serve the socket until either side ends it; return the close code and reason."""
        with self._hub.listening(self._listener) as listener:
            if self._hub.stopping:
                listener.disconnect(4200, "This server is stopping")
            hello = {"socket_id": self.id, "activity_timeout": self._limits.activity_timeout}
            listener.queue_frame(frame("pusher:connection_established", encoded(hello).decode()))
            parts = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]
            try:
                await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await stopped(parts)
            for part in parts:
                if not part.cancelled() and (error := part.exception()) and not isinstance(error, WebSocketDisconnect):
                    raise error
            return listener.leave or (1000, "")

    async def _write(self) -> None:
        """Send the queued messages and frames, ping a silent client, and return when the connection is to be closed."""
        pinged_at: float | None = None
        while True:
            try:
                for one in self._listener.taken():
                    for text in [one] if isinstance(one, str) else map(one[0].frame, one[1]):
                        await self._send(text)
            except TimeoutError:
                self._listener.disconnect(*TOO_SLOW)
                return
            if self._listener.leave is not None:
                return
            if pinged_at is not None and self._heard_at >= pinged_at:
                pinged_at = None
            asks_at = self._heard_at + self._limits.activity_timeout if pinged_at is None else pinged_at
            if pinged_at is None and self._now() >= asks_at:
                pinged_at = asks_at = self._now()
                self._listener.queue_frame(frame("pusher:ping", "{}"))
            elif pinged_at is not None and self._now() >= pinged_at + self._limits.pong_within:
                self._listener.disconnect(*NO_PONG)
            due = asks_at
            if pinged_at is not None:  # check for the pong at intervals: it does not wake the writer
                due = min(pinged_at + self._limits.pong_within, self._now() + self._limits.activity_timeout)
            await self._listener.wait(max(0.0, due - self._now()))

    async def _send(self, text: str) -> None:
        async with asyncio.timeout(self._limits.send_within):
            await self._socket.send_text(text)

    async def _read(self) -> None:
        """Handle the messages of the client, until it disconnects or sends one that is too large."""
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            self._heard_at = self._now()
            text = message.get("text")
            if text is None:
                self._send_error("Send text frames only")
            elif len(text.encode()) > self._limits.message_bytes:
                self._listener.disconnect(*TOO_LARGE)
                await asyncio.sleep(self._limits.send_within)  # the writer sees `leave` and ends the connection
            else:
                self._handle(text)

    def _handle(self, text: str) -> None:
        """Handle one message of the client: a ping or pong, a subscription or its end, or a client event. Any other
        message is answered with an error."""
        try:
            message = from_json(text)
        except ValueError:
            message = None
        match message:
            case {"event": "pusher:ping"}:
                self._listener.queue_frame(frame("pusher:pong", "{}"))
            case {"event": "pusher:pong"}:
                pass
            case {"event": "pusher:subscribe", "data": {"channel": str() as channel} as data}:
                self._subscribe(channel, data.get("auth"))
            case {"event": "pusher:unsubscribe", "data": {"channel": str() as channel}}:
                self._hub.unsubscribe(self._listener, channel)
            case {"event": str() as event, "channel": str() as channel, "data": data} if event.startswith("client-"):
                self._pass_on(event, channel, data)
            case _:
                self._send_error("This message is not understood")

    def _subscribe(self, channel: str, auth: Any) -> None:
        """Subscribe the socket to a channel, or refuse with the reason; `auth` is the signature that a private channel
        needs."""
        joined, private = self._listener.channels, channel.startswith(PRIVATE)
        grant = self._granted(channel, auth) if private else None
        if channel in joined:
            self._send_error(f"Existing subscription to channel {channel}")
        elif not self._is_allowed(channel):
            self._refuse(channel, "InvalidChannel", "Channels of this name or kind are not supported", 400)
        elif len(joined) >= self._limits.subscriptions:
            self._refuse(channel, "LimitReached", f"A socket has {self._limits.subscriptions} channels at most", 4004)
        elif private and grant is None:
            self._refuse(channel, "AuthError", "The signature is not valid for this socket and channel", 401)
        else:
            if grant is not None and grant.api_key is not None:
                self._listener.api_keys[channel] = grant.api_key
            self._listener.queue_frame(frame("pusher_internal:subscription_succeeded", "{}", channel))
            self._hub.subscribe(self._listener, channel)

    def _is_allowed(self, channel: str) -> bool:
        """Return True if a channel of this name can be subscribed to here."""
        if not NAME.fullmatch(channel) or channel.startswith(REFUSED_PREFIXES):
            return False
        # Public channels need no signature. While ours are private, a client that has only the public key cannot open
        # public channels of arbitrary names.
        return channel.startswith(PRIVATE) or not self._hub.private or subject_of(channel) is not None

    def _granted(self, channel: str, auth: Any) -> Grant | None:
        return granted(self._app.key, self._app.secret, self.id, channel, auth) if isinstance(auth, str) else None

    def _pass_on(self, event: str, channel: str, data: Any) -> None:
        """Publish a client event on a private channel that the socket is subscribed to; beyond the rate limit, or on
        another channel, send an error instead."""
        second = int(self._now())
        if len(event) > LONGEST_NAME or not channel.startswith(PRIVATE) or channel not in self._listener.channels:
            self._send_error("Client events are for private channels that the socket is subscribed to", 4301)
        elif self._client_events[second] >= self._limits.client_events:
            self._send_error(f"At most {self._limits.client_events} client events in a second", 4301)
        else:
            self._client_events = Counter({second: self._client_events[second] + 1})
            text = data if isinstance(data, str) else encoded(data).decode()
            self._hub.publish(Message(self._app.tenant, event, [channel], text, not_to=self.id))

    def _send_error(self, why: str, code: int | None = None) -> None:
        """Send the client a `pusher:error`."""
        self._listener.queue_frame(_error(code, why))

    def _refuse(self, channel: str, kind: str, why: str, status: int) -> None:
        """Send the client a `pusher:subscription_error`."""
        error = {"type": kind, "error": why, "status": status}
        self._listener.queue_frame(
            encoded({"event": "pusher:subscription_error", "channel": channel, "data": error}).decode()
        )


def _error(code: int | None, why: str) -> str:
    """Return the frame of a `pusher:error`."""
    return encoded({"event": "pusher:error", "data": {"code": code, "message": why}}).decode()
