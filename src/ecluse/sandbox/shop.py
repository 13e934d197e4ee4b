"""The catalogue of one simulated shop, and the part of Shopify's Admin schema that is executed on it.

1,000 products with ten variants each, computed from the seed; only changed prices and deleted variants are kept.
Product `n` has the tags `first-50` (up to number 50), `first-500`, and one of `season-0` … `season-9`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from hashlib import blake2b
from typing import Any

from graphql import GraphQLError, GraphQLResolveInfo, GraphQLScalarType, build_schema

PRODUCTS = 1_000
VARIANTS = 10
MOST_INPUT = 250
CURRENCY = "EUR"
PRODUCT_ID = re.compile(r"gid://shopify/Product/([1-9][0-9]{0,5})")
VARIANT_ID = re.compile(r"gid://shopify/ProductVariant/([1-9][0-9]{0,5})([0-9]{2})")
TAG = re.compile(r"tag:'?([\w-]+)'?")
CURSOR = re.compile(r"[0-9]{1,9}")

SCHEMA = build_schema("""
scalar Money
scalar DateTime
interface Node { id: ID! }
type Shop { name: String! currencyCode: String! myshopifyDomain: String! }
type MoneyV2 { amount: Money! currencyCode: String! }
type InventoryItem implements Node { id: ID! unitCost: MoneyV2 }
type Product implements Node { id: ID! title: String! tags: [String!]! }
type ProductVariant implements Node {
  id: ID! title: String! displayName: String! sku: String price: Money! compareAtPrice: Money updatedAt: DateTime!
  product: Product! inventoryItem: InventoryItem!
}
type PageInfo { hasNextPage: Boolean! endCursor: String }
type ProductVariantConnection { nodes: [ProductVariant!]! pageInfo: PageInfo! }
input ProductVariantsBulkInput { id: ID price: Money compareAtPrice: Money }
type ProductVariantsBulkUpdateUserError { field: [String!] message: String! code: String }
type ProductVariantsBulkUpdatePayload {
  product: Product productVariants: [ProductVariant!] userErrors: [ProductVariantsBulkUpdateUserError!]!
}
type ProductVariantsBulkDeletePayload { product: Product userErrors: [ProductVariantsBulkUpdateUserError!]! }
type Query {
  shop: Shop!
  productVariants(first: Int!, after: String, query: String): ProductVariantConnection!
  nodes(ids: [ID!]!): [Node]!
}
type Mutation {
  productVariantsBulkUpdate(
    productId: ID!, variants: [ProductVariantsBulkInput!]!, allowPartialUpdates: Boolean = false
  ): ProductVariantsBulkUpdatePayload
  productVariantsBulkDelete(productId: ID!, variantsIds: [ID!]!): ProductVariantsBulkDeletePayload
}
""")


def _money(value: Any) -> Decimal:
    try:
        amount = Decimal(value) if isinstance(value, str) else Decimal(repr(value))
    except InvalidOperation as error:
        raise GraphQLError(f"Variable of type Money has an invalid value: {value!r}") from error
    if not amount.is_finite():
        raise GraphQLError(f"Variable of type Money has an invalid value: {value!r}")
    return amount


def _scalar(name: str) -> GraphQLScalarType:
    found = SCHEMA.get_type(name)
    if not isinstance(found, GraphQLScalarType):
        raise TypeError(name)
    return found


_scalar("Money").coerce_input_value = _money


@dataclass(slots=True)
class Kept:
    """A variant that was changed."""

    price: str
    compare_at: str | None
    updated_at: str


Effect = Callable[[str, object, object], None]  # records the changed variant, its price and its former price
Info = GraphQLResolveInfo[Effect]


class Shop:
    """The state of one shop."""

    def __init__(self, name: str, seed: int) -> None:
        self._name, self._seed = name, seed
        self._kept: dict[str, Kept] = {}
        self._deleted: set[str] = set()

    def shop(self, _: Info) -> dict[str, Any]:
        return {"name": self._name, "currencyCode": CURRENCY, "myshopifyDomain": f"{self._name}.myshopify.com"}

    def productVariants(  # noqa: N802 - the names of the schema
        self, _: Info, first: int, after: str | None = None, query: str | None = None
    ) -> dict[str, Any]:
        if not 0 <= first <= MOST_INPUT:
            raise GraphQLError(f"first must be from 0 to {MOST_INPUT}")
        if after is not None and not CURSOR.fullmatch(after):
            raise GraphQLError("after is not a cursor of this connection")
        tag = TAG.fullmatch(query) if query else None
        if query and tag is None:
            raise GraphQLError("this sandbox searches by tag only: tag:NAME")
        products = [n for n in range(1, PRODUCTS + 1) if tag is None or tag[1] in tags(n)]
        start, total = int(after or 0), len(products) * VARIANTS
        places = range(start, min(start + first, total))
        found = [_variant_id(products[place // VARIANTS], place % VARIANTS) for place in places]
        nodes = [self._variant(one) for one in found if one not in self._deleted]
        ahead = start + first < total
        return {"nodes": nodes, "pageInfo": {"hasNextPage": ahead, "endCursor": str(start + first) if ahead else None}}

    def nodes(self, _: Info, ids: list[str]) -> list[dict[str, Any] | None]:
        _check_size("ids", ids)
        return [self._variant(one) if self._exists(one) else _product(one) for one in ids]

    def productVariantsBulkUpdate(  # noqa: N802 - the names of the schema
        self,
        info: Info,
        productId: str,  # noqa: N803
        variants: list[dict[str, Any]],
        allowPartialUpdates: bool = False,  # noqa: N803
    ) -> dict[str, Any]:
        _check_size("variants", variants)
        product = _product(productId)
        if product is None:
            missing = _user_error(["productId"], "Product does not exist", "PRODUCT_DOES_NOT_EXIST")
            return {"product": None, "productVariants": None, "userErrors": [missing]}
        wrong = [found for n, one in enumerate(variants) if (found := self._wrong(productId, n, one)) is not None]
        if wrong and not allowPartialUpdates:
            return {"product": product, "productVariants": None, "userErrors": wrong}
        bad = {int(one["field"][1]) for one in wrong}
        saved = [self._save(info.context, one) for n, one in enumerate(variants) if n not in bad]
        return {"product": product, "productVariants": saved, "userErrors": wrong}

    def productVariantsBulkDelete(  # noqa: N802 - the names of the schema
        self,
        _: Info,
        productId: str,  # noqa: N803
        variantsIds: list[str],  # noqa: N803
    ) -> dict[str, Any]:
        self._deleted |= {one for one in variantsIds if self._exists(one)}
        return {"product": _product(productId), "userErrors": []}

    def _exists(self, variant: str) -> bool:
        found = VARIANT_ID.fullmatch(variant)
        return (
            found is not None
            and int(found[1]) <= PRODUCTS
            and int(found[2]) < VARIANTS
            and variant not in self._deleted
        )

    def _variant(self, variant: str) -> dict[str, Any]:
        found = VARIANT_ID.fullmatch(variant)
        if found is None:
            raise ValueError(variant)
        number, place = int(found[1]), int(found[2])
        drawn = int.from_bytes(blake2b(f"{self._seed}/{variant}".encode(), digest_size=8).digest())
        cents = 200 + drawn % 29_800
        kept = self._kept.get(variant) or Kept(_text(cents), None, "2026-01-01T00:00:00Z")
        cost = {"amount": _text(cents * (30 + drawn // 30_000 % 40) // 100), "currencyCode": CURRENCY}
        product = _product(f"gid://shopify/Product/{number}")
        return {
            "__typename": "ProductVariant",
            "id": variant,
            "title": f"Size {place}",
            "displayName": f"Product {number} - Size {place}",
            "sku": f"P{number:04d}-{place}",
            "price": kept.price,
            "compareAtPrice": kept.compare_at,
            "updatedAt": kept.updated_at,
            "product": product,
            "inventoryItem": {
                "__typename": "InventoryItem",
                "id": f"gid://shopify/InventoryItem/{number}{place:02d}",
                "unitCost": cost if drawn // 1_200_000 % 20 else None,
            },
        }

    def _wrong(self, product: str, place: int, given: dict[str, Any]) -> dict[str, Any] | None:
        """Return the user error of one variant of an update; None if it can be saved."""
        variant, field = given.get("id"), ["variants", str(place)]
        if variant is None:
            return _user_error([*field, "id"], "Product variant id is missing", "PRODUCT_VARIANT_ID_MISSING")
        if not self._exists(variant):
            return _user_error([*field, "id"], "Product variant does not exist", "PRODUCT_VARIANT_DOES_NOT_EXIST")
        if self._variant(variant)["product"]["id"] != product:
            return _user_error([*field, "id"], "Variant is of another product", "MUST_BE_FOR_THIS_PRODUCT")
        price = given.get("price")
        if price is not None and price < 0:
            text = "Price must be greater than or equal to 0"
            return _user_error([*field, "price"], text, "NEGATIVE_PRICE_VALUE")
        if price is not None and price >= 10**18:
            return _user_error([*field, "price"], "Price is too large", "INVALID_INPUT")
        return None

    def _save(self, effect: Effect, given: dict[str, Any]) -> dict[str, Any]:
        former = self._variant(given["id"])
        price = given.get("price")
        compare_at = given["compareAtPrice"] if "compareAtPrice" in given else former["compareAtPrice"]
        self._kept[given["id"]] = Kept(
            former["price"] if price is None else f"{price:.2f}",
            compare_at if compare_at is None or isinstance(compare_at, str) else f"{compare_at:.2f}",
            datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        )
        effect(given["id"], self._kept[given["id"]].price, former["price"])
        return self._variant(given["id"])


def tags(product: int) -> list[str]:
    """Return the tags of a product."""
    return [f"season-{product % 10}", *(f"first-{size}" for size in (50, 500) if product <= size)]


def _product(text: str) -> dict[str, Any] | None:
    found = PRODUCT_ID.fullmatch(text)
    if found is None or int(found[1]) > PRODUCTS:
        return None
    number = int(found[1])
    return {"__typename": "Product", "id": text, "title": f"Product {number}", "tags": tags(number)}


def _variant_id(product: int, place: int) -> str:
    return f"gid://shopify/ProductVariant/{product}{place:02d}"


def _check_size(name: str, given: list[Any]) -> None:
    if len(given) > MOST_INPUT:
        text = f"The input array size of {len(given)} is greater than the maximum allowed of {MOST_INPUT}."
        raise GraphQLError(text, extensions={"code": "MAX_INPUT_SIZE_EXCEEDED", "argument": name})


def _user_error(field: list[str], message: str, code: str) -> dict[str, Any]:
    return {"field": field, "message": message, "code": code}


def _text(cents: int) -> str:
    return f"{cents // 100}.{cents % 100:02d}"
