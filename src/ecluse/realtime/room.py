"""Realtime of one process: assembles and runs the hub, the relay, the tail, the Pusher server and hosted Pusher."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import psycopg
import structlog

from ecluse.base.tasks import stopped
from ecluse.db.connect import Connection, Pool
from ecluse.db.listen import Hear, listen
from ecluse.engine import EVENTS_CHANNEL, Sink
from ecluse.realtime import apps
from ecluse.realtime.apps import Apps, Vault
from ecluse.realtime.hosted import TENANT as HOSTED_TENANT
from ecluse.realtime.hosted import Hosted, HostedApp
from ecluse.realtime.hub import DISABLED, LARGEST_PAYLOAD, UNAUTHORISED, Hub
from ecluse.realtime.limits import LIMITS, Limits
from ecluse.realtime.pusher_server import PusherServer
from ecluse.realtime.relay import INTERESTS_CHANNEL, LIVE_CHANNEL, Relay
from ecluse.realtime.tail import Tail

log = structlog.get_logger(__name__)
AGAIN_SECONDS = 1.0

DRY_RUN = "PUSHER_DRY_RUN is set: nothing is sent by the Pusher protocol. GET /api/events still works."
NO_KEY = "This server has no encryption key for the secret of the app: set ECLUSE_SECRET_KEY or ECLUSE_SECRET_KEY_FILE."
ELSEWHERE = "This tenant's events go to hosted Pusher: connect there."

__all__ = ["HostedApp", "Realtime"]

# Returns the channels, among those given by the id of an API key, that the key may not read any more.
LostRights = Callable[[Connection, Mapping[int, Collection[str]]], Awaitable[Collection[tuple[int, str]]]]


async def none_lost(_: Connection, __: Mapping[int, Collection[str]]) -> Collection[tuple[int, str]]:
    return ()


class Realtime:
    """Realtime of one process. `vault` None: the server has no key for secrets, so there is no Pusher server; `private`
    and `largest` as in `Hub`; `dry_run`: nothing is sent by the Pusher protocol; `hosted`: the app at hosted Pusher, if
    one is used; `lost_rights` returns the channels of sockets that the API key which authorised them may not read any
    more."""

    def __init__(
        self,
        vault: Vault | None,
        *,
        private: bool = True,
        largest: int = LARGEST_PAYLOAD,
        dry_run: bool = False,
        hosted: HostedApp | None = None,
        limits: Limits = LIMITS,
        lost_rights: LostRights = none_lost,
    ) -> None:
        self._lost_rights = lost_rights
        self.vault, self.dry_run, self.limits = vault, dry_run, limits
        self.hosted = None if dry_run else hosted
        self.hub = Hub(private=private, largest=largest)
        self.apps = None if vault is None else Apps(vault)
        self.pusher = PusherServer(self.hub, self.apps, self.why_no_sockets, limits)
        self._hosted = None if self.hosted is None else Hosted(self.hosted, self.hub, lambda: datetime.now(UTC))
        self.tail: Tail | None = None

    @property
    def sinks(self) -> list[Sink]:
        """The sinks that the publisher has to call with published events."""
        return [] if self._hosted is None else [self._hosted.sink]

    def hosted_for(self, tenant: str) -> HostedApp | None:
        """Return the hosted app if this tenant's events are sent there; otherwise None."""
        return self.hosted if tenant == HOSTED_TENANT else None

    def why_off(self, tenant: str) -> str | None:
        """Return the reason why this tenant's clients get no events by the Pusher protocol; None if they do."""
        if self.dry_run:
            return DRY_RUN
        return NO_KEY if self.vault is None and self.hosted_for(tenant) is None else None

    def why_no_sockets(self, tenant: str) -> str | None:
        """Return the reason why this tenant's clients cannot connect to this process by WebSocket; None if they can."""
        return self.why_off(tenant) or (ELSEWHERE if self.hosted_for(tenant) else None)

    @asynccontextmanager
    async def serving(self, dsn: str, pool: Pool, replica: str, *, answers: bool) -> AsyncIterator[None]:
        """Run the realtime tasks for the duration of the context. `answers`: clients can connect to this replica;
        otherwise it only passes its own events on to other replicas and hosted Pusher."""
        relay = Relay(pool, replica, self.hub, answers=answers, look_every=self.limits.look_every)
        jobs = {"relay": relay.run}
        channels: dict[str, Hear] = {INTERESTS_CHANNEL: relay.hear_interests}
        if answers:
            self.tail = tail = Tail(pool, self.hub)
            await tail.start()
            jobs |= {"tail": tail.run, "shutter": lambda: self._disconnect_unwelcome(pool)}
            channels |= {LIVE_CHANNEL: relay.hear_live, EVENTS_CHANNEL: lambda _: tail.hint.set()}
        jobs["listener"] = lambda: listen(dsn, channels)
        if self._hosted is not None:
            jobs["hosted"] = self._hosted.run
        tasks = [
            asyncio.create_task(_again_and_again(name, job), name=f"realtime {name}") for name, job in jobs.items()
        ]
        try:
            yield
        finally:
            await stopped(tasks)
            if self._hosted is not None:
                await self._hosted.close()
            await relay.leave()

    async def _disconnect_unwelcome(self, pool: Pool) -> None:
        """Disconnect the listeners of disabled tenants, and sockets whose API key was revoked, has expired or may not
        read their channels any more; at intervals, until cancelled."""
        while True:
            await asyncio.sleep(self.limits.shut_every)
            listeners = list(self.hub.listeners)
            if not listeners:
                continue
            joined: dict[int, set[str]] = {}
            for listener in listeners:
                for channel, api_key in listener.api_keys.items():
                    joined.setdefault(api_key, set()).add(channel)
            async with pool.connection() as connection:
                disabled = await apps.shut(connection, sorted({listener.tenant for listener in listeners}))
                lost = set(await self._lost_rights(connection, joined)) if joined else set()
            for listener in listeners:
                if listener.tenant in disabled:
                    listener.disconnect(*DISABLED)
                elif not lost.isdisjoint((api_key, channel) for channel, api_key in listener.api_keys.items()):
                    listener.disconnect(*UNAUTHORISED)


async def _again_and_again(name: str, job: Callable[[], Awaitable[None]]) -> None:
    """Run a part of realtime until cancelled: when it ends or fails, log the failure and restart it after
    AGAIN_SECONDS."""
    while True:
        try:
            await job()
        except psycopg.OperationalError as error:
            log.warning("realtime: database unavailable", part=name, error=str(error).strip())
        except Exception:  # a realtime failure must not affect runs; restart the part
            log.exception("realtime: part failed, restarting", part=name)
        await asyncio.sleep(AGAIN_SECONDS)
