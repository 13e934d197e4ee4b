"""Client of Shopify's GraphQL Admin API.

Shopify answers many refusals with status 200 and `errors`; `THROTTLED` in such an answer and a real 429 are the same
error here. Every answer shows the cost bucket of the shop, which is kept for the caller (`throttle`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from ecluse.base.errors import PermanentError, TransientError, VendorError
from ecluse.base.money import decimal_text, minor_units
from ecluse.base.text import storable
from ecluse.vendors.http import VendorHttp
from ecluse.vendors.shops import CataloguePage, Id, ShopCostBucket, ShopFacts, Variant, Words

VERSION = "2026-10"
PAGE, PAGE_WITH_COSTS = 250, 240  # at two and four points per variant; a query may cost 1,000 points

FACTS = "query Facts { shop { name currencyCode } }"
CATALOGUE = """
query Catalogue($first: Int!, $after: String, $query: String) {
  productVariants(first: $first, after: $after, query: $query) {
    nodes { id sku displayName price product { id tags } %s }
    pageInfo { hasNextPage endCursor }
  }
}
"""
COSTS = "inventoryItem { unitCost { amount currencyCode } }"
PRICES = "query Prices($ids: [ID!]!) { nodes(ids: $ids) { ... on ProductVariant { id price } } }"
# Partial: one bad variant must not hold back the others of its call.
SET_PRICES = """
mutation SetPrices($productId: ID!, $variants: [ProductVariantsBulkInput!]!) {
  productVariantsBulkUpdate(productId: $productId, variants: $variants, allowPartialUpdates: true) {
    productVariants { id price }
    userErrors { field message code }
  }
}
"""
# Refusals of the whole shop by their status -> our code and what to do.
OF_SHOP = {
    401: ("UNAUTHORIZED", "the shop does not accept the access token: give the project a new one"),
    402: ("SHOP_FROZEN", "the shop is frozen until its bill is paid"),
    403: ("FORBIDDEN", "the access token lacks a scope: it needs read_products and write_products"),
    404: ("SHOP_NOT_FOUND", "there is no such shop, or no such version of its API"),
    423: ("SHOP_LOCKED", "the shop is locked: ask Shopify to unlock it"),
}
AGAIN = ("INTERNAL_SERVER_ERROR", "TIMEOUT")  # the mutation may have been applied


class _Answer(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, frozen=True)


class _Status(_Answer):
    maximum_available: float
    currently_available: float
    restore_rate: float


class _Cost(_Answer):
    requested_query_cost: float | None = None
    throttle_status: _Status | None = None


class _Extensions(_Answer):
    cost: _Cost = _Cost()


class _ErrorExtensions(_Answer):
    code: str | None = None


class _Error(_Answer):
    message: str
    extensions: _ErrorExtensions = _ErrorExtensions()


D = TypeVar("D", bound=BaseModel)


class _Envelope(_Answer, Generic[D]):
    data: D | None = None
    errors: list[_Error] = Field(default_factory=list)
    extensions: _Extensions = _Extensions()


class _Shop(_Answer):
    name: str
    currency_code: str


class _Facts(_Answer):
    shop: _Shop


class _Product(_Answer):
    id: Id
    tags: list[str]


class _Money(_Answer):
    amount: str
    currency_code: str


class _Inventory(_Answer):
    unit_cost: _Money | None


class _Listed(_Answer):
    id: Id
    sku: Words | None
    display_name: Words
    price: str
    product: _Product
    inventory_item: _Inventory | None = None


class _PageInfo(_Answer):
    has_next_page: bool
    end_cursor: str | None


class _Connection(_Answer):
    nodes: list[_Listed]
    page_info: _PageInfo


class _Catalogue(_Answer):
    product_variants: _Connection


class _Priced(_Answer):
    id: str
    price: str


class _Elsewhere(_Answer):
    """A node that is not a variant: PRICES selects fields of variants only, so its object in the answer is empty."""

    model_config = ConfigDict(extra="forbid")


class _Prices(_Answer):
    nodes: list[_Priced | _Elsewhere | None]


class _UserError(_Answer):
    field: list[str] | None = None
    message: str
    code: str | None = None


class _Updated(_Answer):
    product_variants: list[_Priced] | None
    user_errors: list[_UserError]


class _SetPrices(_Answer):
    product_variants_bulk_update: _Updated


class Shopify:
    """Client of one shop. `http` has the origin of the shop as its base URL; `currency` is that of the shop."""

    most_read = 250

    def __init__(self, http: VendorHttp, currency: str) -> None:
        self._http = http
        self._currency = currency
        self.throttle: ShopCostBucket | None = None

    @staticmethod
    def headers(token: str) -> Mapping[str, str]:
        return {"X-Shopify-Access-Token": token}

    async def facts(self) -> ShopFacts:
        shop = (await self._ask(_Envelope[_Facts], FACTS, {})).shop
        return ShopFacts(shop.name, shop.currency_code)

    async def catalogue(self, cursor: str | None, *, tag: str | None = None, costs: bool = False) -> CataloguePage:
        variables = {
            "first": PAGE_WITH_COSTS if costs else PAGE,
            "after": cursor,
            "query": None if tag is None else f"tag:'{tag}'",
        }
        found = (
            await self._ask(_Envelope[_Catalogue], CATALOGUE % (COSTS if costs else ""), variables)
        ).product_variants
        following = found.page_info.end_cursor if found.page_info.has_next_page else None
        return CataloguePage([self._variant(one) for one in found.nodes], following)

    async def prices(self, ids: Sequence[str]) -> Mapping[str, int]:
        found = (await self._ask(_Envelope[_Prices], PRICES, {"ids": list(ids)})).nodes
        return {one.id: self._amount(one.price) for one in found if isinstance(one, _Priced)}

    async def set_prices(self, product: str, prices: Mapping[str, int], *, key: str) -> Mapping[str, int | VendorError]:
        ids = list(prices)
        variants = [{"id": one, "price": decimal_text(prices[one], self._currency)} for one in ids]
        variables = {"productId": product, "variants": variants}
        done = (await self._ask(_Envelope[_SetPrices], SET_PRICES, variables, key)).product_variants_bulk_update
        found: dict[str, int | VendorError] = {one.id: self._amount(one.price) for one in done.product_variants or ()}
        for error in done.user_errors:
            for one in _about(error, ids):
                found[one] = PermanentError(
                    storable(f"Shopify refused the price: {error.message}"), code=error.code or "VENDOR_REFUSED"
                )
        return found

    async def _ask(self, kind: type[_Envelope[D]], query: str, variables: Mapping[str, Any], key: str = "") -> D:
        """Send a GraphQL document and return the data of its answer. Raise a VendorError if the call fails or the
        answer has errors. `key`: the idempotency key, if any."""
        headers = {"Idempotency-Key": key} if key else None
        path = f"/admin/api/{VERSION}/graphql.json"
        asked = {"query": query, "variables": variables}
        answer = await self._http.call("POST", path, kind, json=asked, headers=headers, explain=_of_shop)
        cost = answer.extensions.cost
        if (status := cost.throttle_status) is not None:
            self.throttle = ShopCostBucket(
                status.currently_available,
                status.maximum_available,
                status.restore_rate,
                cost.requested_query_cost or 1.0,
            )
        if answer.errors:
            _refuse(self._http.name, answer.errors[0], cost)
        if answer.data is None:
            raise TransientError(f"{self._http.name}: an answer without data and without errors", code="BAD_ANSWER")
        return answer.data

    def _variant(self, one: _Listed) -> Variant:
        cost = one.inventory_item.unit_cost if one.inventory_item is not None else None
        known = cost is not None and cost.currency_code == self._currency
        return Variant(
            id=one.id,
            product=one.product.id,
            sku=one.sku or "",
            title=one.display_name,
            price=self._amount(one.price),
            currency=self._currency,
            tags=tuple(one.product.tags),
            cost=self._cost(cost.amount) if cost is not None and known else None,
        )

    def _amount(self, text: str) -> int:
        try:
            return minor_units(text, self._currency)
        except ValueError as error:
            message = f"{self._http.name}: {error}: the shop's currency is not {self._currency}, or has changed"
            raise PermanentError(message, code="CURRENCY_MISMATCH", ambiguous=True) from error

    def _cost(self, text: str) -> int:
        """Return a unit cost, which may be finer than the currency, rounded up."""
        whole, _, fraction = text.partition(".")
        scale = len(decimal_text(0, self._currency).partition(".")[2])
        kept = minor_units(f"{whole}.{fraction[:scale] or '0'}", self._currency)
        return kept + (1 if fraction[scale:].strip("0") else 0)


def _of_shop(error: VendorError, _: bytes) -> VendorError:
    """Return the error of a refused call, with the code and advice of OF_SHOP if its status means that the whole shop
    refuses."""
    found = OF_SHOP.get(error.status or 0)
    return error if found is None else error.explained(f"{error.message} ({found[1]})", code=found[0])


def _refuse(name: str, error: _Error, cost: _Cost) -> NoReturn:
    """Raise the VendorError for an answer of status 200 that has errors."""
    code, message = error.extensions.code or "VENDOR_REFUSED", storable(f"{name}: {error.message}")
    if code == "THROTTLED":
        raise TransientError(message, code=code, retry_after=_wait(cost), ambiguous=False)
    if code in AGAIN:
        raise TransientError(message, code=code)
    raise PermanentError(message, code=code)


def _wait(cost: _Cost) -> float | None:
    """Return the seconds until the bucket has the points that the refused call needs; None if the answer lacks them."""
    status = cost.throttle_status
    if status is None or cost.requested_query_cost is None or status.restore_rate <= 0:
        return None
    return max(0.0, (cost.requested_query_cost - status.currently_available) / status.restore_rate)


def _about(error: _UserError, ids: Sequence[str]) -> Sequence[str]:
    """Return the variants that a user error is about: the one that its field names, else all."""
    match error.field:
        case ["variants", place, *_] if place.isdigit() and int(place) < len(ids):
            return [ids[int(place)]]
        case _:
            return ids
