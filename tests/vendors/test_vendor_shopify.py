"""The connectors of shops against the sandbox: what they return, and what each refusal becomes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ecluse.base.errors import PermanentError, TransientError, VendorError
from ecluse.testing.sandbox import SandboxProcess
from ecluse.vendors.http import VendorHttp
from ecluse.vendors.price_list import PriceListShop
from ecluse.vendors.shopify import PAGE, Shopify
from ecluse.vendors.shops import CRITICAL, Shop, ShopFacts, is_429_error
from tests.support.raw_server import NOW, answers, client_of, raw_server, response

PRODUCT, FIRST, SECOND = (
    "gid://shopify/Product/1",
    "gid://shopify/ProductVariant/100",
    "gid://shopify/ProductVariant/101",
)


def client(url: str, headers: Any = None) -> VendorHttp:
    return VendorHttp("shop", url, deadline=2, headers=headers, now=lambda: NOW)


@pytest.fixture
async def shop(sandbox: SandboxProcess) -> AsyncIterator[Shopify]:
    async with client(f"{sandbox.url}/shopify/unlimited", Shopify.headers("t")) as http:
        yield Shopify(http, "EUR")


@pytest.fixture
async def price_list_shop(sandbox: SandboxProcess) -> AsyncIterator[PriceListShop]:
    async with client(f"{sandbox.url}/price-list", PriceListShop.headers("t")) as http:
        yield PriceListShop(http, "EUR")


async def read_all(shop: Shop, **wanted: Any) -> list[Any]:
    page = await shop.catalogue(None, **wanted)
    found = list(page.variants)
    while page.cursor is not None:
        page = await shop.catalogue(page.cursor, **wanted)
        found += page.variants
    return found


async def test_the_catalogue_of_a_shop_is_read_page_by_page(shop: Shopify) -> None:
    assert await shop.facts() == ShopFacts("unlimited", "EUR")
    found = await read_all(shop, tag="first-50")
    assert len({one.id for one in found}) == len(found) == 500
    one = found[0]
    assert (one.id, one.product, one.sku, one.currency, one.cost) == (FIRST, PRODUCT, "P0001-0", "EUR", None)
    assert one.tags == ("season-1", "first-50", "first-500")
    assert isinstance(one.price, int)
    costs = [one.cost for one in (await shop.catalogue(None, costs=True)).variants]
    assert None in costs
    assert all(cost is None or 0 < cost < 30_000 for cost in costs)
    assert len((await shop.catalogue(None)).variants) == PAGE == 250


@pytest.mark.req("PRC-51", "PRC-78")
async def test_prices_are_written_in_one_call_and_read_back(shop: Shopify, sandbox: SandboxProcess) -> None:
    assert await shop.set_prices(PRODUCT, {FIRST: 1_999, SECOND: 5}, key="key-1") == {FIRST: 1_999, SECOND: 5}
    missing = "gid://shopify/ProductVariant/99999900"
    assert await shop.prices([FIRST, SECOND, missing, PRODUCT]) == {FIRST: 1_999, SECOND: 5}
    lines = sandbox.ledger("shopify", kind="effect")
    assert [(one["ref"], one["value"], one["key"]) for one in lines] == [
        (FIRST, "19.99", "key-1"),
        (SECOND, "0.05", "key-1"),
    ]


async def test_250_variants_are_one_call_and_what_the_shop_refuses_is_the_error_of_its_variant(shop: Shopify) -> None:
    strange = {f"gid://shopify/ProductVariant/{n}00": 100 for n in range(2, 250)}
    found = await shop.set_prices(PRODUCT, {FIRST: 100, SECOND: -1, **strange}, key="k")
    assert len(found) == 250
    assert found[FIRST] == 100
    errors = [one for one in found.values() if isinstance(one, PermanentError)]
    assert len(errors) == 249
    assert isinstance(found[SECOND], PermanentError)
    assert (found[SECOND].code, found[SECOND].ambiguous) == ("NEGATIVE_PRICE_VALUE", False)
    gone = await shop.set_prices("gid://shopify/Product/9999", {FIRST: 1, SECOND: 2}, key="k")
    assert {one.code for one in gone.values() if isinstance(one, PermanentError)} == {"PRODUCT_DOES_NOT_EXIST"}
    assert len(gone) == 2


@pytest.mark.req("PRC-39", "PRC-40", "PRC-43")
async def test_throttled_with_status_200_and_a_real_429_are_one_error(sandbox: SandboxProcess, shop: Shopify) -> None:
    async with client(f"{sandbox.url}/shopify/standard", Shopify.headers("t")) as http:
        slow = Shopify(http, "EUR")
        await slow.catalogue(None)
        assert slow.throttle is not None
        assert (slow.throttle.largest, slow.throttle.restored_per_second) == (1_000, 50)
        assert slow.throttle.available <= 510
        with pytest.raises(TransientError) as caught:
            await slow.catalogue(None, costs=True)
        assert (caught.value.code, caught.value.ambiguous, is_429_error(caught.value)) == ("THROTTLED", False, True)
        assert caught.value.retry_after is not None
        assert 0 < caught.value.retry_after <= 10.1
    sandbox.set_faults([{"vendor": "shopify", "kind": "throttle", "retry_after": 7}])
    with pytest.raises(TransientError) as caught:
        await shop.set_prices(PRODUCT, {FIRST: 1}, key="k")
    assert (caught.value.code, caught.value.retry_after, caught.value.ambiguous) == ("THROTTLED", 7, False)
    assert is_429_error(caught.value)


@pytest.mark.req("PRC-44")
@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (401, "UNAUTHORIZED", "give the project a new one"),
        (402, "SHOP_FROZEN", "frozen"),
        (403, "FORBIDDEN", "write_products"),
        (404, "SHOP_NOT_FOUND", "no such shop"),
        (423, "SHOP_LOCKED", "locked"),
    ],
)
async def test_a_refusal_of_the_whole_shop_has_a_code_of_its_own(
    sandbox: SandboxProcess, shop: Shopify, status: int, code: str, says: str
) -> None:
    sandbox.set_faults([{"vendor": "shopify", "kind": "refused", "status": status, "code": "x"}])
    with pytest.raises(PermanentError, match=says) as caught:
        await shop.set_prices(PRODUCT, {FIRST: 1}, key="k")
    assert (caught.value.code, caught.value.ambiguous, code in CRITICAL) == (code, False, True)
    assert not is_429_error(caught.value)


async def test_a_token_that_may_not_write_is_critical_and_a_bad_request_is_not(sandbox: SandboxProcess) -> None:
    async with client(f"{sandbox.url}/shopify/unlimited", Shopify.headers("read-only")) as http:
        with pytest.raises(PermanentError) as caught:
            await Shopify(http, "EUR").set_prices(PRODUCT, {FIRST: 1}, key="k")
        assert (caught.value.code, caught.value.code in CRITICAL) == ("ACCESS_DENIED", True)
        with pytest.raises(PermanentError) as caught:
            await Shopify(http, "EUR").prices([FIRST] * 251)
        assert (caught.value.code, caught.value.code in CRITICAL) == ("MAX_INPUT_SIZE_EXCEEDED", False)


@pytest.mark.req("PRC-60")
@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ({"kind": "applied_then_error", "status": 502}, "VENDOR_ERROR_502"),
        ({"kind": "applied_then_reset"}, "VENDOR_DISCONNECTED"),
        ({"kind": "truncated"}, "VENDOR_DISCONNECTED"),
        ({"kind": "wrong_shape"}, "BAD_ANSWER"),
    ],
)
async def test_a_write_without_a_clear_answer_is_in_doubt(
    sandbox: SandboxProcess, shop: Shopify, rule: dict[str, Any], code: str
) -> None:
    sandbox.set_faults([{"vendor": "shopify", "times": 1, **rule}])
    with pytest.raises(TransientError) as caught:
        await shop.set_prices(PRODUCT, {FIRST: 777}, key="k")
    assert (caught.value.code, caught.value.ambiguous) == (code, True)
    assert await shop.prices([FIRST]) == {FIRST: 777}


async def test_prices_in_another_currency_than_the_project_s_are_an_error(sandbox: SandboxProcess) -> None:
    async with client(f"{sandbox.url}/shopify/unlimited", Shopify.headers("t")) as http:
        with pytest.raises(PermanentError) as caught:
            await Shopify(http, "JPY").catalogue(None)
    assert caught.value.code == "CURRENCY_MISMATCH"


def listed(number: int, **given: Any) -> dict[str, Any]:
    """A variant in a page of Shopify's catalogue, or an article of the price list."""
    of_shop = {"id": str(number), "displayName": "n", "price": "1.00", "product": {"id": "1", "tags": []}}
    return {"sku": str(number), "name": "n", "price": "1.00", "currency": "EUR", "version": 1, **of_shop, **given}


def catalogue(*rows: dict[str, Any]) -> dict[str, Any]:
    """An answer with this catalogue, for either kind of shop."""
    page = {"nodes": rows, "pageInfo": {"hasNextPage": False, "endCursor": None}}
    return {"data": {"productVariants": page}, "articles": rows, "total": len(rows), "offset": 0, "limit": 250}


@pytest.mark.parametrize("kind", [Shopify, PriceListShop])
async def test_long_titles_of_a_shop_are_cut_and_long_ids_are_refused(kind: Any) -> None:
    async def read(**given: Any) -> Any:
        raw = response(json.dumps(catalogue(listed(1), listed(2, **given))).encode())
        async with raw_server(answers(raw)) as server, client_of(server.port, deadline=2) as http:
            return (await kind(http, "EUR").catalogue(None)).variants[1]

    long = "n" * 501
    assert (await read(displayName=long, name=long)).title == "n" * 499 + "…"
    assert (await read(id="1" * 500, sku="1" * 500)).id == "1" * 500
    for field in ("product", "id") if kind is Shopify else ("sku",):
        with pytest.raises(TransientError) as caught:
            await read(**{field: {"id": "1" * 501, "tags": []} if field == "product" else "1" * 501})
        assert caught.value.code == "BAD_ANSWER", field


async def test_the_price_list_is_a_shop_of_one_article_per_call(
    price_list_shop: PriceListShop, sandbox: SandboxProcess
) -> None:
    assert await price_list_shop.facts() == ShopFacts("price list", "EUR")
    found = await read_all(price_list_shop)
    assert len({one.id for one in found}) == 10_000
    sku = found[41].id
    assert (sku, found[41].product, found[41].tags) == ("SKU-00042", "SKU-00042", ())
    assert await price_list_shop.prices([sku, "SKU-1"]) == {sku: found[41].price}
    assert await price_list_shop.set_prices(sku, {sku: 1_234}, key="key-1") == {sku: 1_234}
    assert await price_list_shop.prices([sku]) == {sku: 1_234}
    assert [one["key"] for one in sandbox.ledger("price_list", kind="effect")] == ["key-1"]
    sandbox.set_faults([{"vendor": "price_list", "kind": "unauthorized"}])
    with pytest.raises(VendorError) as caught:
        await price_list_shop.prices([sku])
    assert caught.value.code in CRITICAL
