"""The interface of a connected shop: read its catalogue by pages, read prices, write prices. One connector per kind of
shop (`shopify.py`, `price_list.py`) speaks the vendor's protocol; the pricing flow knows only this interface.

Another kind of shop is another class with these methods and a line in `CONNECTORS` of `connectors.py`.
Amounts are minor units of the shop's currency.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple, Protocol

from pydantic import AfterValidator, Field

from ecluse.base.errors import VendorError
from ecluse.base.text import LONGEST_KEY, storable
from ecluse.vendors.http import VendorHttp

# Refusals of the whole shop: no target of a run can succeed, so the run is given up at once.
CRITICAL = frozenset({"UNAUTHORIZED", "FORBIDDEN", "ACCESS_DENIED", "SHOP_FROZEN", "SHOP_LOCKED", "SHOP_NOT_FOUND"})

# Fields of a shop's answers: the id of a product or a variant, and a text for people, which is cut.
Id = Annotated[str, Field(max_length=LONGEST_KEY)]
Words = Annotated[str, AfterValidator(lambda text: storable(text, LONGEST_KEY))]


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant of a product, or an article: anything with a price of its own. `cost`: the shop's own cost, None if
    unknown."""

    id: str
    product: str
    sku: str
    title: str
    price: int
    currency: str
    tags: tuple[str, ...] = ()
    cost: int | None = None


class ShopCostBucket(NamedTuple):
    """The cost bucket of a shop after a call, in points: the points available, the capacity, the points restored per
    second, and the cost of that call."""

    available: float
    largest: float
    restored_per_second: float
    cost: float = 1.0


class ShopFacts(NamedTuple):
    """The name and the currency of a shop."""

    name: str
    currency: str


class CataloguePage(NamedTuple):
    """A page of the catalogue; `cursor` leads to the next page and is None on the last page."""

    variants: Sequence[Variant]
    cursor: str | None


class Shop(Protocol):
    """A client of one shop. Its HTTP client has the shop's origin as base URL and sends `headers(token)`; its
    prices are in the shop's currency. Methods raise a `VendorError`; a refusal of all calls has a code in `CRITICAL`.
    `throttle` is the cost bucket as the last answer showed it; None if the shop has none."""

    most_read: int  # ids per `prices`
    throttle: ShopCostBucket | None

    def __init__(self, http: VendorHttp, currency: str) -> None: ...

    @staticmethod
    def headers(token: str) -> Mapping[str, str]:
        """Return the headers that authenticate every request with the access token."""

    async def facts(self) -> ShopFacts:
        """Return name and currency of the shop. A cheap call, which also tests the credentials."""

    async def catalogue(self, cursor: str | None, *, tag: str | None = None, costs: bool = False) -> CataloguePage:
        """Return the page of the catalogue at `cursor` (None: the first). `tag`: only variants with this tag, if the
        shop can search for tags; `costs`: with the shop's own costs."""

    async def prices(self, ids: Sequence[str]) -> Mapping[str, int]:
        """Return the current prices of at most `most_read` variants, by id; an id that does not exist is left out."""

    async def set_prices(self, product: str, prices: Mapping[str, int], *, key: str) -> Mapping[str, int | VendorError]:
        """Set prices of variants of one product in one call. Return, by id, the price that the shop answered, or the
        error of a variant that the shop refused alone; the result of an id that is left out is unknown. `key` is the
        idempotency key, for shops that record it."""


def is_429_error(error: VendorError) -> bool:
    """Return True if the vendor refused because calls come too fast: by the status 429, or by a code in its answer."""
    return error.status == 429 or error.code in ("429", "THROTTLED")
