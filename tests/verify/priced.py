"""A rule run in order: of four targets one is applied, one has failed, one was rolled back, one was not chosen. Its
shop was written to with one call over two variants, as the program does it."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

if TYPE_CHECKING:
    from tests.verify.world import World

SHOP = "/shopify/unlimited/admin/api/2026-10/graphql.json"
PRODUCT = "gid://shopify/Product/1"
SET_PRICES = """
mutation ($productId: ID!, $variants: [ProductVariantsBulkInput!]!) {
  productVariantsBulkUpdate(productId: $productId, variants: $variants) { userErrors { message } }
}
"""
RULE_RUN = """
INSERT INTO rule_runs (tenant_id, project_id, rule, currency, status, plan_hash, totals, actor, correlation_id, source,
                       created_at, queued_at, started_at, finished_at)
VALUES ('t', 1, '{}', 'EUR', 'PARTIAL', 'hash', '{"changed": 4, "selected": 5}', 'a test', 'c', 'test', now(), now(),
        now(), now()) RETURNING id
"""
TARGET = """
INSERT INTO rule_targets (tenant_id, rule_run_id, variant_id, product_id, sku, title, status, before_amount,
                          after_amount, applied_at, error_code)
VALUES ('t', %s, %s, %s, 'sku', 'title', %s, 2000, 1800, CASE WHEN %s THEN now() END, %s) RETURNING id
"""
MOVE = """
INSERT INTO rule_history (tenant_id, rule_run_id, rule_target_id, from_status, to_status, round, actor, source,
                          correlation_id, at) VALUES ('t', %s, %s, %s, %s, 0, 'a test', 'test', 'c', now())
"""
RECONCILED = """
INSERT INTO rule_reconciliations (tenant_id, rule_run_id, kind, due_at, run_id, started_at, finished_at, checked,
                                  mismatches) VALUES ('t', %s, 'on_demand', now(), 1, now(), now(), 1, 1) RETURNING id
"""
APPLYING = (None, "PREVIEW", "QUEUED", "APPLYING")


def variant(place: int) -> str:
    return f"gid://shopify/ProductVariant/1{place:02d}"


def priced(world: World) -> None:
    run = world.rule_run = world.one(RULE_RUN)
    applied, failed, back = (APPLYING + words for words in (("APPLIED",), ("FAILED",), ("APPLIED", "ROLLED_BACK")))
    targets = [_target(world, place, words) for place, words in enumerate((applied, failed, back, (None, "PREVIEW")))]
    _moves(world, None, (*APPLYING, "PARTIAL"))
    world.sql("INSERT INTO rule_exclusions (rule_run_id, variant_id, sku, title, amount, reason, tenant_id)"
              " VALUES (%s, 'v', 's', 't', 1, 'UNCHANGED', 't')", run)  # fmt: skip
    _execution(world, "apply", {targets[0]: variant(0), targets[2]: variant(2)}, {targets[1]: variant(1)}, 1800)
    _execution(world, "rollback", {targets[2]: variant(2)}, {}, 2000)
    given = {"tenant_id": "t", "rule_run_id": run, "rule_target_id": targets[0], "expected": 1800, "actual": 1}
    world.insert("rule_mismatches", reconciliation_id=world.one(RECONCILED, run), **given)


def _target(world: World, place: int, words: tuple[str | None, ...]) -> int:
    status, code = words[-1], "PRICE_CONFLICT" if words[-1] == "FAILED" else None
    given = (world.rule_run, variant(place), PRODUCT, status, "APPLIED" in words, code)
    target: int = world.one(TARGET, *given)
    _moves(world, target, words)
    return target


def _moves(world: World, target: int | None, words: tuple[str | None, ...]) -> None:
    for former, following in pairwise(words):
        world.sql(MOVE, world.rule_run, target, former, following)


def _execution(world: World, kind: str, done: dict[int, str], failed: dict[int, str], cents: int) -> None:
    """An engine run that has written the prices of `done` in one call; the targets in `failed` were not sent."""
    name = f"pricing:{kind}"
    words = ["queued", "running", "partial" if failed else "completed"]
    run_id = world.run(name, "pricing", words, workflow="SUCCESS", state="running")
    claim = world.claim(run_id, len(done) + len(failed), succeeded=len(done), failed=len(failed))
    world.stage(run_id, len(done) + len(failed), ended_at=world.now, end_cause="done")
    keys = [world.effect(run_id, str(target), "C2", {"amount": cents}) for target in done]  # type: ignore[dict-item]
    world.in_shop(dict.fromkeys(done.values(), f"{cents // 100}.00"), Idempotency_Key=keys[0])
    for target, name_in_shop in {**done, **failed}.items():
        fine = target in done
        if fine:
            world.change_all("effects", "state = 'applied', settled_at = clock_timestamp()", run_id, key=str(target))
            world.change_all("effects", f"target = '{name_in_shop}'", run_id, key=str(target))
        status = "succeeded" if fine else "failed"
        world.item(run_id, str(target), status, claim, failures=not fine, target=name_in_shop, flow="pricing")
        world.insert("outcomes", run_id=run_id, target=name_in_shop, outcome="successful" if fine else "failed")
    for table in ("stages", "claims", "items", "effects"):
        world.change_all(table, f"stage = '{kind}'", run_id)
    counts = f"selected = {len(done) + len(failed)}, successful = {len(done)}, failed = {len(failed)}, ignored = 0"
    state = "partial" if failed else "succeeded"
    world.change(name, "runs", f"state = '{state}', {counts}, ended_at = clock_timestamp(), end_cause = 'normal'")
    world.insert("rule_executions", run_id=run_id, rule_run_id=world.rule_run, kind=kind, number=0)


def look(url: str) -> None:
    """Call the shop without a change."""
    body = json.dumps({"query": "query { shop { name } }"}).encode()
    with urlopen(Request(url + SHOP, body, {"X-Shopify-Access-Token": "shpat_test"}), timeout=10):  # noqa: S310
        pass


def set_prices(url: str, prices: dict[str, str], headers: dict[str, str]) -> None:
    """Set prices in the shop in one call."""
    variables: dict[str, Any] = {"productId": PRODUCT}
    variables["variants"] = [{"id": one, "price": price} for one, price in prices.items()]
    body = json.dumps({"query": SET_PRICES, "variables": variables}).encode()
    sent = {"X-Shopify-Access-Token": "shpat_test", **headers}
    with urlopen(Request(url + SHOP, body, sent), timeout=10) as answer:  # noqa: S310 - the sandbox
        errors = json.load(answer)["data"]["productVariantsBulkUpdate"]["userErrors"]
    assert errors == []
