"""The simulated shop executes the GraphQL documents it gets, charges their cost, keeps prices, and refuses as Shopify
does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ecluse.testing.sandbox import SandboxProcess
from tests.sandbox.client import Client

PAGE = """query P($first: Int!, $after: String, $query: String) {
  productVariants(first: $first, after: $after, query: $query) {
    nodes { id sku price product { id tags } } pageInfo { hasNextPage endCursor } } }"""
UPDATE = """mutation U($productId: ID!, $v: [ProductVariantsBulkInput!]!, $partial: Boolean) {
  productVariantsBulkUpdate(productId: $productId, variants: $v, allowPartialUpdates: $partial) {
    productVariants { id price compareAtPrice } userErrors { field message code } } }"""
NODES = "query N($ids: [ID!]!) { nodes(ids: $ids) { id ... on ProductVariant { price } } }"
DELETE = """mutation D($productId: ID!, $ids: [ID!]!) {
  productVariantsBulkDelete(productId: $productId, variantsIds: $ids) { userErrors { message } } }"""
PRODUCT = "gid://shopify/Product/1"


def variant(number: int) -> str:
    return f"gid://shopify/ProductVariant/{number}"


async def ask(
    http: Client,
    document: str,
    *,
    shop: str = "unlimited",
    token: str = "t",  # noqa: S107
    version: str = "2026-10",
    **variables: Any,
) -> tuple[int, dict[str, Any]]:
    answer = await http.post(
        f"shopify/{shop}/admin/api/{version}/graphql.json",
        json={"query": document, "variables": variables},
        headers={"X-Shopify-Access-Token": token, "Idempotency-Key": "key-1"},
    )
    return answer.status, answer.json()


async def data(http: Client, document: str, **variables: Any) -> dict[str, Any]:
    status, body = await ask(http, document, **variables)
    assert (status, body.get("errors")) == (200, None)
    found: dict[str, Any] = body["data"]
    return found


async def update(http: Client, *variants: dict[str, Any], product: str = PRODUCT, **more: Any) -> dict[str, Any]:
    answer = await data(http, UPDATE, productId=product, v=list(variants), **more)
    found: dict[str, Any] = answer["productVariantsBulkUpdate"]
    return found


async def test_the_catalogue_is_paged_by_cursor_to_its_end(http: Client) -> None:
    after, ids = None, []
    while True:
        page = (await data(http, PAGE, first=250, after=after, query="tag:first-50"))["productVariants"]
        ids += [node["id"] for node in page["nodes"]]
        if not page["pageInfo"]["hasNextPage"]:
            break
        after = page["pageInfo"]["endCursor"]
    assert len(ids) == len(set(ids)) == 500
    first = (await data(http, PAGE, first=1))["productVariants"]["nodes"][0]
    assert first["product"] == {"id": PRODUCT, "tags": ["season-1", "first-50", "first-500"]}
    last = (await data(http, PAGE, first=250, after="9990"))["productVariants"]
    assert (len(last["nodes"]), last["pageInfo"]) == (10, {"hasNextPage": False, "endCursor": None})


async def test_prices_are_kept_per_shop_and_each_saved_variant_is_a_line_of_the_ledger(
    http: Client, sandbox: SandboxProcess
) -> None:
    before = (await data(http, NODES, ids=[variant(100)]))["nodes"][0]["price"]
    done = await update(http, {"id": variant(100), "price": "19.9"}, {"id": variant(101), "price": "0.01"})
    assert [one["price"] for one in done["productVariants"]] == ["19.90", "0.01"]
    found = (await data(http, NODES, ids=[variant(100), variant(101), PRODUCT, variant(99_999_900)]))["nodes"]
    assert found == [
        {"id": variant(100), "price": "19.90"},
        {"id": variant(101), "price": "0.01"},
        {"id": PRODUCT},
        None,
    ]
    elsewhere = (await data(http, NODES, ids=[variant(100)], shop="unlimited-2"))["nodes"]
    assert elsewhere == [{"id": variant(100), "price": before}]
    lines = sandbox.ledger("shopify", kind="effect")
    assert [(one["ref"], one["value"], one["key"]) for one in lines] == [
        (variant(100), "19.90", "key-1"),
        (variant(101), "0.01", "key-1"),
    ]
    assert lines[0]["before"] == before
    assert lines[0]["call_seq"] == lines[1]["call_seq"]


async def test_bad_variants_have_an_error_each_and_only_a_partial_update_saves_the_others(
    http: Client, sandbox: SandboxProcess
) -> None:
    await data(http, DELETE, productId=PRODUCT, ids=[variant(103)])
    variants = [
        {"id": variant(100), "price": "1"},
        {"id": variant(101), "price": "-1"},
        {"id": variant(200), "price": "1"},
        {"id": variant(103), "price": "1"},
        {"price": "1"},
    ]
    whole = await update(http, *variants)
    assert whole["productVariants"] is None
    assert [(one["field"], one["code"]) for one in whole["userErrors"]] == [
        (["variants", "1", "price"], "NEGATIVE_PRICE_VALUE"),
        (["variants", "2", "id"], "MUST_BE_FOR_THIS_PRODUCT"),
        (["variants", "3", "id"], "PRODUCT_VARIANT_DOES_NOT_EXIST"),
        (["variants", "4", "id"], "PRODUCT_VARIANT_ID_MISSING"),
    ]
    assert sandbox.ledger("shopify", kind="effect") == []
    partial = await update(http, *variants, partial=True)
    assert [one["id"] for one in partial["productVariants"]] == [variant(100)]
    assert partial["userErrors"] == whole["userErrors"]
    missing = await update(http, variants[0], product="gid://shopify/Product/9999")
    assert [one["code"] for one in missing["userErrors"]] == ["PRODUCT_DOES_NOT_EXIST"]


@pytest.mark.req("PRC-43")
async def test_a_call_costs_its_points_and_one_that_the_bucket_lacks_is_throttled_with_status_200(http: Client) -> None:
    status, body = await ask(http, PAGE, shop="standard", first=250)
    cost = body["extensions"]["cost"]
    assert (status, cost["requestedQueryCost"], cost["actualQueryCost"]) == (200, 502, 502)
    assert cost["throttleStatus"] == {"maximumAvailable": 1000, "currentlyAvailable": 498, "restoreRate": 50}
    dear = "{ productVariants(first: 250) { nodes { product { id } inventoryItem { id } } } }"
    status, body = await ask(http, dear, shop="standard")
    assert (status, "data" in body, body["errors"][0]["extensions"]["code"]) == (200, False, "THROTTLED")
    refused = body["extensions"]["cost"]
    assert (refused["requestedQueryCost"], refused["actualQueryCost"]) == (751, None)
    await asyncio.sleep(0.2)
    _, body = await ask(http, "{ shop { name } }", shop="standard")
    assert (
        body["extensions"]["cost"]["throttleStatus"]["currentlyAvailable"]
        > refused["throttleStatus"]["currentlyAvailable"]
    )
    _, body = await ask(http, PAGE, shop="standard-2", first=250)
    assert "data" in body


async def test_what_was_asked_for_and_not_found_is_not_charged(http: Client) -> None:
    _, body = await ask(http, PAGE, shop="plus", first=250, after="9990")
    cost = body["extensions"]["cost"]
    assert (cost["requestedQueryCost"], cost["actualQueryCost"]) == (502, 22)
    _, body = await ask(http, UPDATE, shop="plus", productId=PRODUCT, v=[])
    assert body["extensions"]["cost"]["actualQueryCost"] == 10


@pytest.mark.parametrize(
    ("document", "variables", "code"),
    [
        ("{ shop { nam } }", {}, None),
        ("{ shop {", {}, None),
        (PAGE, {}, None),
        (PAGE, {"first": 251}, None),
        (PAGE, {"first": 1, "query": "vendor:x"}, None),
        (UPDATE, {"productId": PRODUCT, "v": [{"id": variant(100), "price": "cheap"}]}, None),
        (UPDATE, {"productId": PRODUCT, "v": [{"id": variant(100)}] * 251}, "MAX_INPUT_SIZE_EXCEEDED"),
        ("{ productVariants(first: 250) { nodes { product { id } inventoryItem { unitCost { amount } } } } }", {},
         "MAX_COST_EXCEEDED"),
    ],
)  # fmt: skip
async def test_a_document_that_cannot_be_executed_is_answered_with_errors(
    http: Client, sandbox: SandboxProcess, document: str, variables: dict[str, Any], code: str | None
) -> None:
    status, body = await ask(http, document, **variables)
    assert status == 200
    assert body["errors"][0].get("extensions", {}).get("code") == code
    assert sandbox.ledger("shopify", kind="effect") == []


async def test_tokens_shops_and_versions_are_checked(http: Client) -> None:
    shop = "{ shop { name currencyCode } }"
    assert (await ask(http, shop))[1]["data"] == {"shop": {"name": "unlimited", "currencyCode": "EUR"}}
    assert (await ask(http, shop, token="invalid"))[0] == 401  # noqa: S106
    assert (await ask(http, shop, shop="nowhere"))[0] == 404
    assert (await ask(http, shop, version="latest"))[0] == 404
    status, body = await ask(http, UPDATE, token="read-only", productId=PRODUCT, v=[])  # noqa: S106
    assert (status, body["errors"][0]["extensions"]["code"]) == (200, "ACCESS_DENIED")
    assert (await ask(http, shop, token="read-only"))[0] == 200  # noqa: S106


async def test_caps_and_rules_apply_to_a_shop_and_a_rule_may_name_its_product(
    http: Client, sandbox: SandboxProcess
) -> None:
    sandbox.set_limits({"vendor": "shopify", "per_second": 2, "burst": 40})
    answers = [await ask(http, "{ shop { name } }") for _ in range(60)]
    assert [status for status, _ in answers].count(429) >= 1
    assert "Exceeded" in answers[-1][1]["errors"]
    sandbox.reset()
    rules = [
        {"vendor": "shopify", "kind": "applied_then_error", "status": 502, "ids": [PRODUCT]},
        {"vendor": "shopify", "kind": "refused", "status": 402, "code": "frozen", "ids": ["gid://shopify/Product/2"]},
    ]
    sandbox.set_faults(rules)
    assert (await ask(http, UPDATE, productId=PRODUCT, v=[{"id": variant(100), "price": "5"}]))[0] == 502
    assert (await ask(http, UPDATE, productId="gid://shopify/Product/2", v=[]))[0] == 402
    assert (await ask(http, "{ shop { name } }"))[0] == 200
    assert [one["value"] for one in sandbox.ledger("shopify", kind="effect")] == ["5.00"]
