"""A receiver of webhooks and a mail server in the test's own loop, real ones on real sockets, which answer as a test
sets and keep what they were sent; and an engine that notifies them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from email import message_from_bytes
from email.message import Message
from email.policy import default
from typing import Any

from aiohttp import web
from aiosmtpd.smtp import SMTP

from ecluse.access.secrets import Secrets
from ecluse.engine import Event, write_events
from ecluse.engine.kit import Kit
from ecluse.notify import endpoints
from ecluse.notify.rules import RETRY, Kind
from ecluse.notify.webhook_signature import new_secret
from ecluse.notify.work import Setup, Smtp
from tests.support.engine_flows import until

HERE = ("127.0.0.0/8",)
SENDER = "Ecluse <ecluse@example.com>"
CONFIRMED = """
INSERT INTO mail_addresses (tenant_id, address, asked_at, confirmed_at)
SELECT %s, lower(address), ecluse_now(), ecluse_now() FROM unnest(%s::text[]) AS given(address)
ON CONFLICT (tenant_id, address) DO UPDATE SET confirmed_at = ecluse_now(), token_hash = NULL, expires_at = NULL
"""


@dataclass
class Got:
    headers: dict[str, str]
    body: bytes


@dataclass
class Receiver:
    """Answers with the next of its statuses, and with the last one from then on; a negative one never answers."""

    statuses: list[int] = field(default_factory=lambda: [204])
    headers: dict[str, str] = field(default_factory=dict)
    text: str = ""
    got: list[Got] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    @property
    def ids(self) -> list[str]:
        return [one.headers["webhook-id"] for one in self.got]

    async def take(self, request: web.Request) -> web.Response:
        self.got.append(Got({name.lower(): value for name, value in request.headers.items()}, await request.read()))
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if status < 0:
            await asyncio.sleep(120)
        return web.Response(status=status, headers=self.headers, text=self.text)


@asynccontextmanager
async def receiving(*statuses: int, **options: Any) -> AsyncIterator[Receiver]:
    receiver = Receiver(list(statuses) or [204], **options)
    app = web.Application()
    app.router.add_route("*", "/{anything:.*}", receiver.take)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    receiver.port = runner.addresses[0][1]
    try:
        yield receiver
    finally:
        await runner.cleanup()


@dataclass
class Mailbox:
    """Says what its script says to the next recipient or text, and takes it when the script is over. CUT hangs up."""

    at_rcpt: list[str] = field(default_factory=list)
    at_data: list[str] = field(default_factory=list)
    taken: list[Message[str, str]] = field(default_factory=list)
    envelopes: list[tuple[str, list[str]]] = field(default_factory=list)
    port: int = 0

    async def handle_RCPT(self, server: SMTP, _: Any, envelope: Any, address: str, __: Any) -> str:  # noqa: N802
        if self.at_rcpt:
            said = self.at_rcpt.pop(0)
            if said == "CUT":
                server.transport.abort()
            return said
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: SMTP, _: Any, envelope: Any) -> str:  # noqa: N802
        said = self.at_data.pop(0) if self.at_data else "250 taken"
        if said.startswith(("250", "CUT")):
            self.taken.append(message_from_bytes(envelope.content, policy=default))
            self.envelopes.append((envelope.mail_from, list(envelope.rcpt_tos)))
        if said == "CUT":
            server.transport.abort()
        return said


@asynccontextmanager
async def mail_server(port: int = 0, **script: list[str]) -> AsyncIterator[Mailbox]:
    mailbox = Mailbox(**script)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: SMTP(mailbox, loop=loop, hostname="mail.example.com"), "127.0.0.1", port)
    mailbox.port = server.sockets[0].getsockname()[1]
    try:
        yield mailbox
    finally:
        server.close()
        await server.wait_closed()


@asynccontextmanager
async def overloaded_mail_server(port: int) -> AsyncIterator[None]:
    """Turns every client away."""

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"421 too many connections\r\n")
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", port)
    try:
        yield
    finally:
        server.close()
        await server.wait_closed()


@dataclass
class World:
    """Tenants' endpoints, and the engine that tells them."""

    kit: Kit
    query: Callable[..., list[Any]]
    secrets: Secrets

    async def endpoint(
        self, url: str, *events: str, tenant: str = "default", kind: Kind = "webhook", secret: str | None = None
    ) -> tuple[int, str]:
        """Its id and its secret."""
        secret = secret or new_secret()
        async with self.kit.pool.connection() as connection, connection.transaction():
            row = await endpoints.create(connection, tenant, kind, url=url, events=list(events) or ["*"])
            await self.secrets.put(connection, tenant, endpoints.secret_name(row["id"]), secret)
            await self.secrets.put(connection, tenant, endpoints.url_name(row["id"]), url)
        return row["id"], secret

    async def mail_endpoint(
        self, *addresses: str, events: Iterable[str] = ("*",), tenant: str = "default", confirmed: bool = True
    ) -> int:
        if confirmed:
            confirm(self.query, *addresses, tenant=tenant)
        async with self.kit.pool.connection() as connection:
            row = await endpoints.create(connection, tenant, "mail", addresses=list(addresses), events=list(events))
        return int(row["id"])

    async def tell(self, *kinds: str, tenant: str = "default", **payload: Any) -> None:
        """Events through the outbox, as flows write them."""
        async with self.kit.pool.connection() as connection, connection.transaction():
            written = [
                Event(tenant, f"{kind}-{n}-{payload}", kind, f"thing:{n}", payload, correlation_id="test")
                for n, kind in enumerate(kinds)
            ]
            await write_events(connection, written)

    def states(self) -> list[tuple[str, str | None]]:
        return [
            tuple(row)
            for row in self.query(
                "SELECT r.state, i.error_code FROM deliveries d JOIN runs r ON r.id = d.run_id"
                " JOIN items i ON i.run_id = r.id ORDER BY d.run_id"
            )
        ]

    async def settled(self, count: int = 1) -> list[tuple[str, str | None]]:
        """Until so many deliveries have ended."""
        await until(lambda: sum(state in ("succeeded", "failed") for state, _ in self.states()) >= count)
        return self.states()

    async def tried(self, executions: int) -> None:
        """Until the items have been tried so often at least, all together."""
        tries = "SELECT coalesce(sum(executions), 0) FROM items WHERE flow = 'notifications'"
        await until(lambda: self.query(tries)[0][0] >= executions)

    async def next_try(self, executions: int) -> None:
        """Until the only item has been tried so often, and then for as long as it waits."""
        await self.tried(executions)
        await self.later(timedelta(seconds=min(RETRY.base * RETRY.multiplier ** (executions - 1), RETRY.longest) * 1.2))

    async def later(self, by: timedelta) -> None:
        before = self.kit.clock.offset
        self.query('UPDATE clock_offset SET "offset" = "offset" + %s', by)
        self.query("SELECT pg_notify('ecluse_clock', '')")
        await until(lambda: self.kit.clock.offset > before + by - timedelta(seconds=1))
        if self.kit.worker:
            self.kit.worker.wake()


Start = Callable[..., Awaitable[World]]


def smtp_of(mailbox: Mailbox, **options: Any) -> Smtp:
    return Smtp("127.0.0.1", mailbox.port, SENDER, **{"starttls": False, "timeout": 20.0, **options})


def setup_of(dsn: str, secrets: Secrets, **options: Any) -> Setup:
    return Setup(dsn, secrets.get, **{"allowed_networks": HERE, "webhook_timeout": 20.0, **options})


def new_secrets() -> Secrets:
    return Secrets(os.urandom(32))


def confirm(query: Callable[..., list[Any]], *addresses: str, tenant: str = "default") -> None:
    """These addresses have followed their links."""
    query(CONFIRMED, tenant, list(addresses))
