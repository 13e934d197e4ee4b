"""A generic REST price list: articles to page through and read, prices to write, articles to create.

Any ``SKU-<5 digits or more>`` exists, with a name and a price computed from the seed; only changed or created
articles are stored. Creation honours ``Idempotency-Key``, price writes honour ``If-Match``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b

from ecluse.sandbox.ledger import Entry
from ecluse.sandbox.vendor import Answer, Call, error_answer, json_answer, json_object

CATALOGUE_SIZE = 10_000
MAX_PAGE = 500
FIRST_CREATED = 900_000_001

SKU = re.compile(r"SKU-[0-9]{5,}")
COUNT = re.compile(r"[0-9]{1,9}")
PRICE = re.compile(r"[0-9]{1,7}\.[0-9]{2}")

NOUNS = ("Écrou", "Boulon", "Câble", "Vérin", "Joint torique", "Étau", "Clé plate", "Roulement", "Perceuse", "Équerre")
MATERIALS = ("acier", "inox", "laiton", "zingué", "fonte grise", "aluminium", "nylon renforcé", "caoutchouc")


@dataclass(slots=True)
class Article:
    """An article; its price is text with two decimals."""

    sku: str
    name: str
    price: str
    version: int = 1

    def as_json(self) -> dict[str, object]:
        return {
            "sku": self.sku,
            "name": self.name,
            "price": self.price,
            "currency": "EUR",
            "version": self.version,
        }


@dataclass(slots=True)
class Creation:
    """The creation under an idempotency key; it is running until its first call is answered."""

    wanted: dict[str, object]
    call: Entry
    answer: Answer


class PriceList:
    """The simulated price list."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._kept: dict[str, Article] = {}
        self._created: list[str] = []
        self._creations: dict[str, Creation] = {}

    def ref(self, call: Call) -> str | None:
        parts = call.path.split("/")
        return parts[2] if len(parts) > 2 else None

    def error(self, status: int, code: str, message: str) -> Answer:
        return error_answer(status, code, message)

    def handle(self, call: Call) -> Answer:
        match call.method, call.path.split("/")[1:]:
            case "GET", ["articles"]:
                return self._list(call)
            case "POST", ["articles"]:
                return self._create(call)
            case "GET", ["articles", sku] if SKU.fullmatch(sku):
                return json_answer(self._article(sku).as_json())
            case "PUT", ["articles", sku, "price"] if SKU.fullmatch(sku):
                return self._set_price(call, sku)
            case _, ["articles"]:
                return error_answer(405, "method_not_allowed", f"{call.method} is not allowed here")
            case _, ["articles", sku] | ["articles", sku, "price"] if SKU.fullmatch(sku):
                return error_answer(405, "method_not_allowed", f"{call.method} is not allowed here")
            case _:
                return error_answer(404, "not_found", f"{call.path} does not exist")

    def _article(self, sku: str) -> Article:
        """Return an article as it is now: changed, created, or computed from the seed."""
        kept = self._kept.get(sku)
        if kept is not None:
            return kept
        number = int.from_bytes(blake2b(f"{self._seed}/{sku}".encode(), digest_size=8).digest())
        cents = 50 + number % 49_950
        noun, material = NOUNS[number // 49_950 % len(NOUNS)], MATERIALS[number // 499_500 % len(MATERIALS)]
        return Article(sku, f"{noun} {material} n° {number % 997}", f"{cents // 100}.{cents % 100:02d}")

    def _list(self, call: Call) -> Answer:
        offset, limit = call.query.get("offset", "0"), call.query.get("limit", "100")
        if not (COUNT.fullmatch(offset) and COUNT.fullmatch(limit) and 1 <= int(limit) <= MAX_PAGE):
            return error_answer(422, "bad_page", f"offset must be 0 or more, limit from 1 to {MAX_PAGE}")
        total = CATALOGUE_SIZE + len(self._created)
        shown = (self._article(self._sku_at(i)) for i in range(int(offset), min(int(offset) + int(limit), total)))
        priced = call.query.get("prices") == "true"
        articles = [one.as_json() if priced else {"sku": one.sku, "name": one.name} for one in shown]
        return json_answer({"articles": articles, "total": total, "offset": int(offset), "limit": int(limit)})

    def _sku_at(self, index: int) -> str:
        """Return the SKU at this place of the list."""
        return f"SKU-{index + 1:05d}" if index < CATALOGUE_SIZE else self._created[index - CATALOGUE_SIZE]

    def _set_price(self, call: Call, sku: str) -> Answer:
        wanted = json_object(call.body)
        price = wanted.get("price") if wanted is not None else None
        if not is_price(price):
            return error_answer(422, "bad_price", 'price must be a string such as "12.50"')
        article = self._article(sku)
        expected = call.headers.get("If-Match")
        if expected is not None and expected.strip('"') != str(article.version):
            return error_answer(412, "version_mismatch", f"{sku} is at version {article.version}")
        self._kept[sku] = Article(sku, article.name, str(price), article.version + 1)
        call.effect(sku, price, article.price)
        return json_answer(self._kept[sku].as_json())

    def _create(self, call: Call) -> Answer:
        wanted = json_object(call.body)
        name = wanted.get("name") if wanted is not None else None
        if wanted is None or not is_price(wanted.get("price")) or not isinstance(name, str) or not name:
            return error_answer(422, "bad_article", 'name must be a text and price a string such as "12.50"')
        key = call.entry.key
        first = self._creations.get(key) if key is not None else None
        if first is None:
            answer = self._new_article(call, name, str(wanted["price"]))
            if key is not None:
                self._creations[key] = Creation(wanted, call.entry, answer)
            return answer
        if first.wanted != wanted:
            return error_answer(422, "key_reused", "this Idempotency-Key was used with another body")
        if first.call.done_at is None:
            return error_answer(409, "key_in_use", "the first call with this Idempotency-Key is still running")
        return first.answer

    def _new_article(self, call: Call, name: str, price: str) -> Answer:
        """Create an article, record the effect and return the answer."""
        sku = f"SKU-{FIRST_CREATED + len(self._created)}"
        article = Article(sku, name, price)
        self._kept[sku] = article
        self._created.append(sku)
        call.effect(sku, article.as_json())
        return json_answer(article.as_json(), 201)


def is_price(value: object) -> bool:
    """Return True for a text with two decimals, such as "12.50"."""
    return isinstance(value, str) and PRICE.fullmatch(value) is not None
