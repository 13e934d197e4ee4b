"""The price list's adapter on the session's sandbox."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from ecluse.testing.sandbox import SandboxProcess
from ecluse.vendors.http import VendorHttp
from ecluse.vendors.price_list import PriceList
from tests.support.raw_server import NOW


@pytest.fixture
async def http(sandbox: SandboxProcess) -> AsyncIterator[VendorHttp]:
    http = VendorHttp("price list", f"{sandbox.url}/price-list", deadline=0.5, largest_body=100_000, now=lambda: NOW)
    yield http
    await http.close()


@pytest.fixture
def price_list(http: VendorHttp) -> PriceList:
    return PriceList(http)
