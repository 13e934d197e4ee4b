"""The price list behaves as a vendor would when nothing goes wrong."""

from __future__ import annotations

import asyncio
import re
from urllib.request import urlopen

import pytest
from aiohttp import ClientTimeout

from ecluse.testing.sandbox import SandboxProcess, running_sandbox
from tests.sandbox.client import Client

ARTICLES = "price-list/articles"
NEW = {"name": "Équerre d'atelier", "price": "7.40"}


async def test_the_catalogue_is_paged_to_its_very_end(http: Client) -> None:
    first = (await http.get(ARTICLES, params={"offset": 0, "limit": 500})).json()
    assert [article["sku"] for article in first["articles"][:2]] == ["SKU-00001", "SKU-00002"]
    assert (len(first["articles"]), first["total"], first["offset"], first["limit"]) == (500, 10_000, 0, 500)
    last = (await http.get(ARTICLES, params={"offset": 9_990, "limit": 500})).json()
    assert [article["sku"] for article in last["articles"]] == [f"SKU-{n:05d}" for n in range(9_991, 10_001)]
    beyond = (await http.get(ARTICLES, params={"offset": 10_000})).json()
    assert (beyond["articles"], beyond["limit"]) == ([], 100)


@pytest.mark.parametrize("query", ["limit=501", "limit=0", "limit=ten", "offset=-1", f"offset={'9' * 5000}"])
async def test_a_page_that_cannot_be_is_refused(http: Client, query: str) -> None:
    answer = await http.get(f"{ARTICLES}?{query}")
    assert (answer.status, answer.json()["error"]["code"]) == (422, "bad_page")


async def test_an_article_is_the_same_in_the_list_and_alone(http: Client) -> None:
    listed = (await http.get(f"{ARTICLES}?offset=41&limit=1")).json()["articles"][0]
    article = (await http.get(f"{ARTICLES}/SKU-00042")).json()
    assert set(article) == {"sku", "name", "price", "currency", "version"}
    assert {"sku": article["sku"], "name": article["name"]} == listed
    assert re.fullmatch(r"[0-9]+\.[0-9]{2}", article["price"])
    assert (article["currency"], article["version"]) == ("EUR", 1)


def test_the_seed_makes_the_prices(sandbox: SandboxProcess, other_seed: SandboxProcess) -> None:
    def articles(sandbox: SandboxProcess) -> list[bytes]:
        urls = [f"{sandbox.url}/{ARTICLES}/SKU-{n:05d}" for n in (1, 2, 123_456)]
        return [urlopen(url).read() for url in urls]  # noqa: S310

    first = articles(sandbox)
    assert len(set(first)) == 3
    assert not set(articles(other_seed)) & set(first)
    with running_sandbox(seed=1) as same:
        assert articles(same) == first


@pytest.mark.parametrize("name", ["SKU-1234", "sku-12345", "SKU-12345x", "SKU-", "x", "SKU-00001/name"])
async def test_another_name_is_not_an_article(http: Client, name: str) -> None:
    answer = await http.get(f"{ARTICLES}/{name}")
    assert (answer.status, answer.json()["error"]["code"]) == (404, "not_found")


async def test_a_method_an_article_does_not_have_is_refused(http: Client) -> None:
    assert (await http.delete(f"{ARTICLES}/SKU-00001")).status == 405
    assert (await http.get(f"{ARTICLES}/SKU-00001/price")).status == 405
    assert (await http.put(ARTICLES)).status == 405


async def test_a_price_written_is_read_back(http: Client, sandbox: SandboxProcess) -> None:
    before = (await http.get(f"{ARTICLES}/SKU-00042")).json()
    written = (await http.put(f"{ARTICLES}/SKU-00042/price", json={"price": "12.50"})).json()
    assert written == before | {"price": "12.50", "version": 2}
    assert (await http.get(f"{ARTICLES}/SKU-00042")).json() == written
    [effect] = sandbox.ledger(kind="effect")
    assert (effect["ref"], effect["before"], effect["value"]) == ("SKU-00042", before["price"], "12.50")


@pytest.mark.parametrize(
    "body",
    ['{"price":"12.5"}', '{"price":12.5}', '{"price":"-1.00"}', '{"price":"12,50"}', "{}", "[]", "{", "", "\xff"],
)
async def test_a_price_that_is_none_is_refused(http: Client, sandbox: SandboxProcess, body: str) -> None:
    answer = await http.put(f"{ARTICLES}/SKU-00042/price", data=body.encode("latin-1"))
    assert (answer.status, answer.json()["error"]["code"]) == (422, "bad_price")
    assert sandbox.ledger(kind="effect") == []


async def test_if_match_guards_the_version(http: Client, sandbox: SandboxProcess) -> None:
    async def write(price: str, version: str) -> int:
        url = f"{ARTICLES}/SKU-00042/price"
        return (await http.put(url, json={"price": price}, headers={"If-Match": version})).status

    assert await write("1.00", "1") == 200
    assert await write("2.00", "1") == 412
    assert await write("3.00", '"2"') == 200
    assert [effect["value"] for effect in sandbox.ledger(kind="effect")] == ["1.00", "3.00"]


async def test_creating_without_a_key_creates_each_time(http: Client, sandbox: SandboxProcess) -> None:
    answers = [await http.post(ARTICLES, json=NEW) for _ in range(2)]
    created = [answer.json() for answer in answers]
    assert [answer.status for answer in answers] == [201, 201]
    assert created[0]["sku"] != created[1]["sku"]
    assert all(re.fullmatch(r"SKU-9[0-9]+", article["sku"]) for article in created)
    assert (await http.get(f"{ARTICLES}/{created[0]['sku']}")).json() == created[0]
    page = (await http.get(f"{ARTICLES}?offset=10000")).json()
    assert (page["total"], [article["sku"] for article in page["articles"]]) == (
        10_002,
        [article["sku"] for article in created],
    )
    assert [effect["value"] for effect in sandbox.ledger(kind="effect")] == created


async def test_a_creation_needs_a_name_and_a_price(http: Client, sandbox: SandboxProcess) -> None:
    bodies: list[object] = [{"name": "Étau"}, {"price": "1.00"}, {"name": "", "price": "1.00"}, []]
    for body in [*bodies, {"name": 3, "price": "1.00"}]:
        assert (await http.post(ARTICLES, json=body)).status == 422
    assert sandbox.ledger(kind="effect") == []


async def test_a_key_used_again_replays_the_answer_without_a_second_effect(
    http: Client, sandbox: SandboxProcess
) -> None:
    key = {"Idempotency-Key": "k1"}
    first, second = [await http.post(ARTICLES, json=NEW, headers=key) for _ in range(2)]
    assert (second.status, second.json()) == (201, first.json())
    other = await http.post(ARTICLES, json=NEW | {"price": "8.00"}, headers=key)
    assert (other.status, other.json()["error"]["code"]) == (422, "key_reused")
    [effect] = sandbox.ledger(kind="effect")
    assert effect["key"] == "k1"
    await http.post(ARTICLES, json=NEW, headers={"Idempotency-Key": "k2"})
    assert len(sandbox.ledger(kind="effect")) == 2


async def test_a_key_in_use_is_a_conflict_until_the_first_call_ends(http: Client, sandbox: SandboxProcess) -> None:
    sandbox.set_faults([{"kind": "latency", "seconds": 0.4, "times": 1}])
    key = {"Idempotency-Key": "k1"}
    with pytest.raises(TimeoutError):
        await http.post(ARTICLES, json=NEW, headers=key, timeout=ClientTimeout(total=0.15))
    during = await http.post(ARTICLES, json=NEW, headers=key)
    assert (during.status, during.json()["error"]["code"]) == (409, "key_in_use")
    await asyncio.sleep(0.35)
    assert (await http.post(ARTICLES, json=NEW, headers=key)).status == 201
    assert len(sandbox.ledger(kind="effect")) == 1


async def test_a_text_that_is_not_unicode_does_not_break_the_answers(http: Client, sandbox: SandboxProcess) -> None:
    answer = await http.post(ARTICLES, data=b'{"name":"a\\ud800b","price":"1.00"}')
    assert answer.json()["name"] == "a\ud800b"
    assert sandbox.ledger(kind="effect")[0]["value"]["name"] == "a\ud800b"
