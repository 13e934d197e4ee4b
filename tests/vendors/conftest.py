"""One sandbox process for the whole folder, as good as new for each test, and the price list's adapter on it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from ecluse.vendors.http import VendorHttp
from ecluse.vendors.price_list import PriceList
from tests.sandbox_process import SandboxProcess, running_sandbox
from tests.vendors.raw_server import NOW


@pytest.fixture(scope="session")
def process() -> Iterator[SandboxProcess]:
    with running_sandbox(seed=1) as running:
        yield running


@pytest.fixture
def sandbox(process: SandboxProcess) -> SandboxProcess:
    process.reset()
    return process


@pytest.fixture
async def http(sandbox: SandboxProcess) -> AsyncIterator[VendorHttp]:
    http = VendorHttp("price list", f"{sandbox.url}/price-list", deadline=0.5, largest_body=100_000, now=lambda: NOW)
    yield http
    await http.close()


@pytest.fixture
def price_list(http: VendorHttp) -> PriceList:
    return PriceList(http)
