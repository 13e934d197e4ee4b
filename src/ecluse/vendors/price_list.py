"""Client of the generic REST price list: list and read articles, write prices, create articles; and the price list as a
shop of the pricing flow, one article per call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from urllib.parse import quote

from pydantic import BaseModel

from ecluse.base.errors import PermanentError, TransientError, VendorError
from ecluse.base.money import decimal_text, minor_units
from ecluse.vendors.http import VendorHttp
from ecluse.vendors.shops import CataloguePage, Id, ShopCostBucket, ShopFacts, Variant, Words

PAGE = 250
MOST_VERSIONS = 10_000  # articles whose version is remembered: many more than calls are in flight


class Article(BaseModel):
    """An article with its price; `version` grows with each change."""

    sku: Id
    name: Words
    price: Decimal
    currency: str
    version: int


class ListedArticle(BaseModel):
    sku: Id
    name: Words


class ArticlePage(BaseModel):
    articles: list[ListedArticle]
    total: int
    offset: int
    limit: int


class PricedPage(BaseModel):
    articles: list[Article]
    total: int
    offset: int
    limit: int


class PriceList:
    """Client of the price list."""

    def __init__(self, http: VendorHttp) -> None:
        self._http = http

    async def articles(self, offset: int, limit: int) -> ArticlePage:
        """Return a page of the list of articles, without their prices."""
        return await self._http.call("GET", "/articles", ArticlePage, query={"offset": offset, "limit": limit})

    async def priced(self, offset: int, limit: int) -> PricedPage:
        """Return a page of the list of articles, with their prices."""
        query: dict[str, str | int] = {"offset": offset, "limit": limit, "prices": "true"}
        return await self._http.call("GET", "/articles", PricedPage, query=query)

    async def article(self, sku: str) -> Article:
        """Return one article with its price."""
        return await self._http.call("GET", f"/articles/{quote(sku, safe='')}", Article)

    async def set_price(self, sku: str, price: Decimal, *, version: int, idempotency_key: str) -> Article:
        """Set the price if the article is still at this version, and return the article. Raise `PermanentError`
        PRECONDITION_FAILED if it has changed, so that a concurrent change is not overwritten. The vendor does not
        deduplicate by the key; it only records the write under it."""
        path = f"/articles/{quote(sku, safe='')}/price"
        headers = {"If-Match": f'"{version}"', "Idempotency-Key": idempotency_key}
        return await self._http.call("PUT", path, Article, json={"price": as_text(price)}, headers=headers)

    async def create(self, name: str, price: Decimal, idempotency_key: str) -> Article:
        """Create an article and return it. Under the same key the vendor creates one article only, and answers with it
        again."""
        wanted = {"name": name, "price": as_text(price)}
        headers = {"Idempotency-Key": idempotency_key}
        try:
            return await self._http.call("POST", "/articles", Article, json=wanted, headers=headers)
        except PermanentError as exc:
            if exc.code != "CONFLICT":
                raise
            # The first call with this key is still in progress at the vendor: a later retry returns its result.
            raise TransientError(exc.message, code=exc.code) from exc


def as_text(price: Decimal) -> str:
    """Return the price with two decimals, as the vendor requires. A price with more decimals is not rounded here: the
    vendor refuses it."""
    cents = round(price, 2)
    return f"{cents if cents == price else price:f}"


class PriceListShop:
    """The price list as a shop: an article is a product of its own. It has no tags and no costs. A price is written at
    the version that was read last, so that a change in between is not overwritten, and a write is one call."""

    most_read = 1
    throttle: ShopCostBucket | None = None

    def __init__(self, http: VendorHttp, currency: str) -> None:
        self._list = PriceList(http)
        self._currency = currency
        self._versions: dict[str, int] = {}  # of articles that were read and not written since

    @staticmethod
    def headers(token: str) -> Mapping[str, str]:
        return {"Authorization": f"Bearer {token}"}

    async def facts(self) -> ShopFacts:
        (article,) = (await self._list.priced(0, 1)).articles
        return ShopFacts("price list", article.currency)

    async def catalogue(self, cursor: str | None, *, tag: str | None = None, costs: bool = False) -> CataloguePage:  # noqa: ARG002
        start = int(cursor or 0)
        page = await self._list.priced(start, PAGE)
        ahead = start + PAGE < page.total
        return CataloguePage([self._variant(one) for one in page.articles], str(start + PAGE) if ahead else None)

    async def prices(self, ids: Sequence[str]) -> Mapping[str, int]:
        found = {}
        for one in ids:
            try:
                article = await self._list.article(one)
            except PermanentError as error:
                if error.code != "NOT_FOUND":
                    raise
                continue
            found[one] = self._amount(article)
            self._versions[one] = article.version
            if len(self._versions) > MOST_VERSIONS:
                del self._versions[next(iter(self._versions))]
        return found

    async def set_prices(self, product: str, prices: Mapping[str, int], *, key: str) -> Mapping[str, int | VendorError]:  # noqa: ARG002
        ((sku, price),) = prices.items()
        version = self._versions.pop(sku, None) or (await self._list.article(sku)).version
        written = await self._list.set_price(
            sku, Decimal(decimal_text(price, self._currency)), version=version, idempotency_key=key
        )
        return {sku: self._amount(written)}

    def _variant(self, one: Article) -> Variant:
        return Variant(
            id=one.sku,
            product=one.sku,
            sku=one.sku,
            title=one.name,
            price=minor_units(str(one.price), one.currency),
            currency=one.currency,
        )

    def _amount(self, article: Article) -> int:
        if article.currency != self._currency:
            message = f"{article.sku} has a price in {article.currency}, not in {self._currency}"
            raise PermanentError(message, code="CURRENCY_MISMATCH")
        return minor_units(str(article.price), self._currency)
