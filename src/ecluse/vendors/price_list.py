"""Client of the generic REST price list: list and read articles, write prices, create articles. A listing has no
prices; those are read article by article."""

from __future__ import annotations

from decimal import Decimal
from urllib.parse import quote

from pydantic import BaseModel

from ecluse.base.errors import PermanentError, TransientError
from ecluse.vendors.http import VendorHttp


class Article(BaseModel):
    """An article with its price; `version` grows with each change."""

    sku: str
    name: str
    price: Decimal
    currency: str
    version: int


class ListedArticle(BaseModel):
    sku: str
    name: str


class ArticlePage(BaseModel):
    articles: list[ListedArticle]
    total: int
    offset: int
    limit: int


class PriceList:
    """Client of the price list."""

    def __init__(self, http: VendorHttp) -> None:
        self._http = http

    async def articles(self, offset: int, limit: int) -> ArticlePage:
        """Return a page of the list of articles."""
        return await self._http.call("GET", "/articles", ArticlePage, query={"offset": offset, "limit": limit})

    async def article(self, sku: str) -> Article:
        """Return one article with its price."""
        return await self._http.call("GET", f"/articles/{quote(sku, safe='')}", Article)

    async def set_price(self, sku: str, price: Decimal, *, version: int, idempotency_key: str) -> Article:
        """Set the price if the article is still at this version, so that a concurrent change is not overwritten. The
        vendor does not deduplicate by the key; it only records the write under it."""
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
