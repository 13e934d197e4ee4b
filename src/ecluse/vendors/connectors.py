"""The kinds of shops that can be connected, and their clients. A client is guarded, because users give its URL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Literal

from ecluse.vendors.guarded import GuardedHttp
from ecluse.vendors.http import VendorHttp
from ecluse.vendors.price_list import PriceListShop
from ecluse.vendors.shopify import Shopify
from ecluse.vendors.shops import Shop

Connector = Literal["shopify", "price_list"]
CONNECTORS: Mapping[str, type[Shop]] = {"shopify": Shopify, "price_list": PriceListShop}


@asynccontextmanager
async def opened(
    connector: str,
    base_url: str,
    token: str,
    currency: str,
    *,
    allowed_networks: Sequence[str],
    now: Callable[[], datetime],
    deadline: float = 30.0,
) -> AsyncIterator[Shop]:
    """Open a client of the shop at `base_url` for the duration of the context. Raise `PermanentError` FORBIDDEN_URL if
    the URL is refused. `allowed_networks` are private networks that may be reached; `deadline`: seconds per call."""
    kind, guard = CONNECTORS[connector], GuardedHttp(allowed_networks)
    try:
        resolver = guard.resolver(base_url)
        async with VendorHttp(
            connector, base_url, headers=kind.headers(token), resolver=resolver, now=now, deadline=deadline
        ) as http:
            http.hide(token)
            yield kind(http, currency)
    finally:
        await guard.close()
