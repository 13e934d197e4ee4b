"""The price list's adapter against the sandbox: what it returns, and what each fault becomes."""

from __future__ import annotations

import asyncio
import time
from decimal import Decimal
from typing import Any

import pytest

from ecluse.base.errors import PermanentError, TransientError, VendorError
from ecluse.testing.sandbox import SandboxProcess
from ecluse.vendors.http import VendorHttp
from ecluse.vendors.price_list import Article, ListedArticle, PriceList, PriceListShop, as_text

SKU = "SKU-00042"
PRICE = Decimal("12.50")

# (rule, class, code, ambiguous, retry_after)
FAULTS: list[tuple[dict[str, Any], type[VendorError], str, bool | None, float | None]] = [
    ({"kind": "throttle", "retry_after": 7}, TransientError, "THROTTLED", False, 7.0),
    ({"kind": "server_error", "status": 500}, TransientError, "VENDOR_ERROR_500", True, None),
    ({"kind": "server_error", "status": 503}, TransientError, "VENDOR_ERROR_503", True, None),
    ({"kind": "applied_then_error", "status": 502}, TransientError, "VENDOR_ERROR_502", True, None),
    ({"kind": "reset"}, TransientError, "VENDOR_DISCONNECTED", True, None),
    ({"kind": "applied_then_reset"}, TransientError, "VENDOR_DISCONNECTED", True, None),
    ({"kind": "truncated"}, TransientError, "VENDOR_DISCONNECTED", True, None),
    ({"kind": "timeout", "seconds": 5}, TransientError, "TIMEOUT", True, None),
    ({"kind": "latency", "seconds": 5}, TransientError, "TIMEOUT", True, None),
    ({"kind": "slow_body", "chunk": 1, "delay": 0.1}, TransientError, "TIMEOUT", True, None),
    ({"kind": "invalid_json"}, TransientError, "BAD_ANSWER", True, None),
    ({"kind": "wrong_shape"}, TransientError, "BAD_ANSWER", True, None),
    ({"kind": "bad_unicode"}, TransientError, "BAD_ANSWER", True, None),
    ({"kind": "huge_body", "bytes": 100_001}, PermanentError, "ANSWER_TOO_LARGE", True, None),
    ({"kind": "not_found"}, PermanentError, "NOT_FOUND", False, None),
    ({"kind": "unauthorized"}, PermanentError, "UNAUTHORIZED", False, None),
    ({"kind": "redirect", "location": "/elsewhere"}, PermanentError, "VENDOR_REDIRECT", True, None),
]


def facts(error: VendorError) -> tuple[type[VendorError], str, bool, float | None]:
    return type(error), error.code, error.ambiguous, getattr(error, "retry_after", None)


async def set_price(price_list: PriceList, version: int = 1) -> Article:
    return await price_list.set_price(SKU, PRICE, version=version, idempotency_key="key-1")


async def test_articles_are_paged_through(price_list: PriceList) -> None:
    page = await price_list.articles(offset=9_998, limit=5)
    assert [article.sku for article in page.articles] == ["SKU-09999", "SKU-10000"]
    assert isinstance(page.articles[0], ListedArticle)
    assert (page.total, page.offset, page.limit) == (10_000, 9_998, 5)


async def test_a_price_is_written_and_read_back(price_list: PriceList) -> None:
    before = await price_list.article(SKU)
    written = await set_price(price_list)
    assert written == before.model_copy(update={"price": PRICE, "version": 2})
    assert await price_list.article(SKU) == written


async def test_a_price_that_another_client_changed_meanwhile_is_not_overwritten(
    price_list: PriceList, sandbox: SandboxProcess
) -> None:
    await set_price(price_list)
    with pytest.raises(PermanentError) as caught:
        await set_price(price_list, version=1)
    assert (caught.value.code, caught.value.ambiguous) == ("PRECONDITION_FAILED", True)
    assert [effect["key"] for effect in sandbox.ledger(kind="effect")] == ["key-1"]


async def test_a_shop_writes_in_one_call_at_the_version_that_it_read(
    http: VendorHttp, price_list: PriceList, sandbox: SandboxProcess
) -> None:
    shop = PriceListShop(http, "EUR")
    await shop.prices([SKU])
    assert await shop.set_prices(SKU, {SKU: 1_250}, key="key-1") == {SKU: 1_250}
    assert len(sandbox.ledger(kind="call")) == 2  # the read and the write
    await shop.prices([SKU])
    await price_list.set_price(SKU, Decimal(1), version=2, idempotency_key="another client")
    with pytest.raises(PermanentError, match="412"):
        await shop.set_prices(SKU, {SKU: 1_300}, key="key-2")


async def test_an_article_is_created_once_per_key(price_list: PriceList, sandbox: SandboxProcess) -> None:
    first = await price_list.create("Écrou", PRICE, "key-1")
    assert first == Article(sku=first.sku, name="Écrou", price=PRICE, currency="EUR", version=1)
    assert await price_list.create("Écrou", PRICE, "key-1") == first
    assert len(sandbox.ledger(kind="effect")) == 1


async def test_a_key_reused_for_something_else_is_refused(price_list: PriceList) -> None:
    await price_list.create("Écrou", PRICE, "key-1")
    with pytest.raises(PermanentError) as caught:
        await price_list.create("Boulon", PRICE, "key-1")
    assert caught.value.code == "VENDOR_REFUSED"


async def test_a_creation_that_is_still_running_may_be_asked_for_again(
    price_list: PriceList, sandbox: SandboxProcess
) -> None:
    sandbox.set_faults([{"kind": "latency", "seconds": 1, "times": 1}])
    for code in ("TIMEOUT", "CONFLICT"):
        with pytest.raises(TransientError) as caught:
            await price_list.create("Écrou", PRICE, "key-1")
        assert (caught.value.code, caught.value.ambiguous) == (code, True)


async def test_an_unknown_article_is_recognised_by_its_code(price_list: PriceList) -> None:
    with pytest.raises(PermanentError) as caught:
        await price_list.article("SKU 1/é?#")
    assert caught.value.code == "NOT_FOUND"
    assert caught.value.message.startswith("price list GET /articles/SKU%201%2F%C3%A9%3F%23: 404 ")


@pytest.mark.parametrize(
    ("price", "text"),
    [("12.5", "12.50"), ("12", "12.00"), ("1E+2", "100.00"), ("12.500", "12.50"), ("12.505", "12.505")],
)
def test_a_price_is_written_with_two_decimals_and_never_rounded(price: str, text: str) -> None:
    assert as_text(Decimal(price)) == text


@pytest.mark.parametrize("method", ["GET", "PUT"])
@pytest.mark.parametrize(
    ("rule", "family", "code", "ambiguous", "retry_after"),
    FAULTS,
    ids=[f"{rule['kind']}-{code}" for rule, _, code, *_ in FAULTS],
)
async def test_each_fault_is_one_error_after_one_call(
    price_list: PriceList,
    sandbox: SandboxProcess,
    method: str,
    rule: dict[str, Any],
    family: type[VendorError],
    code: str,
    ambiguous: bool,
    retry_after: float | None,
) -> None:
    await price_list.article("SKU-00001")  # leaves a kept connection: where aiohttp would send a second time
    sandbox.set_faults([{**rule, "ids": [SKU]}])
    started = time.monotonic()
    with pytest.raises(VendorError) as caught:
        await (price_list.article(SKU) if method == "GET" else set_price(price_list))
    assert time.monotonic() - started < 0.5 + 0.5
    assert facts(caught.value) == (family, code, ambiguous, retry_after)
    path = f"/articles/{SKU}" if method == "GET" else f"/articles/{SKU}/price"
    assert caught.value.message.startswith(f"price list {method} {path}: ")
    assert [call["fault"] for call in sandbox.ledger(kind="call")] == [None, rule["kind"]]


@pytest.mark.req("ENG-42")
@pytest.mark.parametrize(
    ("rule", "least", "most"),
    [
        ({"retry_after": 7}, 7, 7),
        ({"retry_after": 0}, 0, 0),
        ({"retry_after": "-5"}, 0, 0),
        # The vendor's clock and ours are years apart in these tests: only its own Date makes sense of its date.
        ({"retry_after": "date", "seconds": 30}, 29, 32),
        ({"retry_after": "Wed, 01 Jan 2020 00:00:00 GMT"}, 0, 0),
    ],
)
async def test_retry_after_is_passed_on_in_seconds(
    price_list: PriceList, sandbox: SandboxProcess, rule: dict[str, Any], least: float, most: float
) -> None:
    sandbox.set_faults([{"kind": "throttle", **rule}])
    with pytest.raises(TransientError) as caught:
        await price_list.article(SKU)
    assert caught.value.retry_after is not None
    assert least <= caught.value.retry_after <= most


@pytest.mark.req("ENG-42")
@pytest.mark.parametrize("value", ["soon", "1e3", "", "NaN"])
async def test_retry_after_that_makes_no_sense_is_none(
    price_list: PriceList, sandbox: SandboxProcess, value: str
) -> None:
    sandbox.set_faults([{"kind": "throttle", "retry_after": value}])
    with pytest.raises(TransientError) as caught:
        await price_list.article(SKU)
    assert facts(caught.value) == (TransientError, "THROTTLED", False, None)


async def test_a_stuck_call_leaves_the_others_alone(price_list: PriceList, sandbox: SandboxProcess) -> None:
    sandbox.set_faults([{"kind": "timeout", "seconds": 5, "ids": [SKU]}])
    stuck = asyncio.create_task(price_list.article(SKU))
    others = await asyncio.gather(*(price_list.article(f"SKU-{n:05d}") for n in range(100, 120)))
    assert len(others) == 20
    assert not stuck.done()
    with pytest.raises(TransientError, match="no answer within"):
        await stuck
    assert len(sandbox.ledger(kind="call")) == 21


async def test_the_deadline_of_one_call_may_be_its_own(http: VendorHttp, sandbox: SandboxProcess) -> None:
    sandbox.set_faults([{"kind": "latency", "seconds": 0.7}])
    assert await http.call("GET", f"/articles/{SKU}", ListedArticle, deadline=5)
