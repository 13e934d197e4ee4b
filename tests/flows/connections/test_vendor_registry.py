"""The clients of a process: made once per credential, made anew when a connection changes, closed when not used."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ecluse.base.clock import Clock
from ecluse.base.errors import PermanentError
from ecluse.db.connect import pool
from ecluse.engine import Item, WorkContext
from ecluse.flows.connections import records, registry
from ecluse.flows.connections.records import secret_name
from tests.support.vendor_clients import SECRETS, connect, vendors_at


def item(tenant: str = "acme", **payload: Any) -> Item:
    return Item(1, 1, tenant, "automation", "fetch", "1001", "", payload or None, 0, 0, 0, "k")


@pytest.fixture
async def context(dsn, sandbox):
    async with pool(dsn, size=2) as open_pool, vendors_at(sandbox, crm_key="of-the-server")(Clock()) as vendors:
        yield WorkContext(vendors, Clock().now, pool=open_pool)


async def fetch(context: WorkContext, of: Item) -> Any:
    """Return the client that was used."""
    used = []

    async def call(crm: Any) -> None:
        used.append(crm)
        await crm.fiche("1001")

    await context.vendors.crm(context, of, call)
    return used[-1]


async def put_key(connection: Any, key: str, tenant: str = "acme") -> None:
    await SECRETS.put(connection, tenant, secret_name("crm"), key)


async def test_items_of_one_tenant_share_a_client_and_tenants_do_not(context, connection, sandbox, query):
    for tenant in ("acme", "beta"):
        await connect(connection, sandbox, tenant)
    first, again, other, default = [await fetch(context, item(t)) for t in ("acme", "acme", "beta", "default")]
    assert first is again
    assert len({id(first), id(other), id(default)}) == 3


async def test_a_tenant_without_a_connection_does_not_get_the_server_s(context, connection, sandbox):
    with pytest.raises(PermanentError, match="no connection to the CRM") as caught:
        await fetch(context, item("beta"))
    assert caught.value.code == "NO_CONNECTION"
    assert "ecluse connections create" in caught.value.message
    assert sandbox.ledger(kind="call") == []


async def test_a_record_of_the_tenant_default_goes_before_the_environment(context, connection, sandbox, monkeypatch):
    monkeypatch.setattr(registry, "FRESH_SECONDS", 0.0)
    environment = await fetch(context, item("default"))
    await connect(connection, sandbox, "default", ["crm"])
    assert await fetch(context, item("default")) is not environment
    await records.delete(connection, "default", "crm")
    assert (await fetch(context, item("default")))._api_key == "of-the-server"


async def test_a_change_is_seen_and_the_old_client_is_closed_after_its_last_call(
    context, connection, sandbox, monkeypatch
):
    await connect(connection, sandbox, "acme")
    monkeypatch.setattr(registry, "FRESH_SECONDS", 0.0)
    asked, let = asyncio.Event(), asyncio.Event()

    async def slow(crm: Any) -> Any:
        asked.set()
        await let.wait()
        await crm.fiche("1001")
        return crm

    hanging = asyncio.create_task(context.vendors.crm(context, item(), slow))
    await asked.wait()
    await put_key(connection, "another-key")
    new = await fetch(context, item())
    let.set()
    old = await hanging
    assert (old._api_key, new._api_key) == ("key-of-acme", "another-key")
    assert (old._http._session.closed, new._http._session.closed) == (True, False)


async def test_a_refused_key_is_read_again_once(context, connection, sandbox, monkeypatch):
    await connect(connection, sandbox, "acme", api_key="forbidden")
    monkeypatch.setattr(registry, "REFUSED_SECONDS", 0.0)
    with pytest.raises(PermanentError, match="403"):
        await fetch(context, item())
    assert len(sandbox.ledger(kind="call")) == 1  # the same key is not sent twice
    await put_key(connection, "a-good-key")
    assert await fetch(context, item())
    assert len(sandbox.ledger(kind="call")) == 3


async def test_a_client_that_is_not_used_is_closed(context, connection, sandbox, monkeypatch):
    for tenant in ("acme", "beta"):
        await connect(connection, sandbox, tenant)
    unused = await fetch(context, item("acme"))
    monkeypatch.setattr(registry, "IDLE_SECONDS", 0.0)
    await fetch(context, item("beta"))
    assert unused._http._session.closed


async def test_a_schedule_s_own_key_goes_to_the_url_of_its_tenant_s_connection(context, connection, sandbox):
    await connect(connection, sandbox, "acme", api_key="forbidden")
    await SECRETS.put(connection, "acme", "schedule:7", "of-the-schedule")
    assert (await fetch(context, item(own_key_of="7")))._api_key == "of-the-schedule"
    with pytest.raises(PermanentError, match="no longer exists") as caught:
        await fetch(context, item(own_key_of="8"))
    assert caught.value.code == "NO_KEY"


async def test_a_url_of_a_private_network_is_not_called_though_it_is_stored(dsn, connection, sandbox):
    """Networks may be taken from the allowed ones later, and a name may lead elsewhere tomorrow."""
    await connect(connection, sandbox, "acme")
    async with pool(dsn, size=2) as open_pool, vendors_at(sandbox, allowed_networks=())(Clock()) as vendors:
        with pytest.raises(PermanentError) as caught:
            await fetch(WorkContext(vendors, Clock().now, pool=open_pool), item())
    assert caught.value.code == "FORBIDDEN_URL"
    assert sandbox.ledger(kind="call") == []


async def test_no_connection_of_the_database_is_held_while_a_vendor_is_called(context, connection, sandbox):
    await connect(connection, sandbox, "acme")
    await context.pool.wait()  # until all its connections are open

    async def call(crm: Any) -> None:
        assert context.pool.get_stats().get("requests_waiting", 0) == 0
        assert context.pool.get_stats()["pool_available"] == context.pool.get_stats()["pool_size"]
        await crm.fiche("1001")

    await context.vendors.crm(context, item(), call)
