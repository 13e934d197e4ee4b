"""The clients of the flows at the sandbox: by the environment, by connections of tenants, and as others hear them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from ecluse.access.secrets import Secrets
from ecluse.base.clock import Clock
from ecluse.engine import Flow
from ecluse.flows.connections import records
from ecluse.flows.connections.clients import Access, Setup
from ecluse.flows.connections.records import KINDS, Kind
from ecluse.flows.connections.registry import Vendors
from ecluse.testing.sandbox import SandboxProcess

SECRETS = Secrets(bytes(range(32)))
LOOPBACK = ("127.0.0.0/8",)
PLACES: dict[Kind, str] = {"crm": "/crm", "speech": "/elevenlabs", "llm": "/llm/v1"}


def vendors_at(sandbox: SandboxProcess, **given: Any) -> Callable[[Clock], Any]:
    """The `vendors` of a flow. `given`: `crm_key`, `speech_url`, `llm_deadline` and the like, and fields of `Setup`."""
    parts: dict[str, Any] = {
        **{f"{kind}_url": sandbox.url + place for kind, place in PLACES.items()},
        **{f"{kind}_key": "key" for kind in KINDS},
        "crm_deadline": 10.0,
        "speech_deadline": 10.0,
        "llm_deadline": 30.0,
        "llm_model": "gpt-4.1",
        **given,
    }
    rest = {name: value for name, value in given.items() if name.partition("_")[0] not in KINDS or name == "speech"}
    made = Setup(
        environment={
            kind: Access(parts[f"{kind}_url"], parts[f"{kind}_key"], parts.get(f"{kind}_model")) for kind in KINDS
        },
        deadlines={kind: parts[f"{kind}_deadline"] for kind in KINDS},
        **{"read_secret": SECRETS.get, "allowed_networks": LOOPBACK, **rest},
    )
    return partial(Vendors, made)


async def connect(
    connection: Any, sandbox: SandboxProcess, tenant: str, kinds: Iterable[Kind] = KINDS, **given: Any
) -> None:
    """Give a tenant connections to the sandbox, without a test; the tenant is made if it is not there."""
    await connection.execute(
        "INSERT INTO tenants (id, name, created_at) VALUES (%s, %s, ecluse_now()) ON CONFLICT DO NOTHING",
        (tenant, tenant),
    )
    for kind in kinds:
        url = {"base_url": sandbox.url + PLACES[kind], "model": "gpt-4.1" if kind == "llm" else None}
        caps: dict[str, Any] = {"max_in_flight": None, "per_minute": None, "api_key_ends": None}
        values = {**url, **caps, **{name: value for name, value in given.items() if name != "api_key"}}
        await records.create(connection, tenant, kind, values, "a test")
        key = given.get("api_key", f"key-of-{tenant}")
        await SECRETS.put(connection, tenant, records.secret_name(kind), key)


def heard_by(flow: Flow, kind: Kind, other: Callable[[Any], Any]) -> Flow:
    """Return the flow with `other(client)` in the place of each client of this kind."""
    inner = flow.vendors

    @asynccontextmanager
    async def changed(clock: Clock) -> AsyncIterator[Vendors]:
        async with inner(clock) as vendors:
            calling = getattr(vendors, kind)

            async def call(context: Any, item: Any, ask: Any) -> Any:
                return await calling(context, item, lambda client: ask(other(client)))

            setattr(vendors, kind, call)
            yield vendors

    return replace(flow, vendors=changed)
