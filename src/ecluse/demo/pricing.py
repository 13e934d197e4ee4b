"""Demonstration of pricing: a rule lowers 500 prices in a shop that throttles, fails, and loses answers; the server is
killed half-way, another client changes prices in between. Failed targets are retried, the shop is compared with what
was applied, and the former prices are restored. At the end, the ledger of the shop decides."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any

from rich.console import Console

from ecluse.base.errors import SetUpError
from ecluse.demo import overrides
from ecluse.demo.overrides import DEAD_AFTER, HEARTBEAT, QUIET, Override
from ecluse.demo.scene import Scene, audited, get, post, scene, stay, what_stays, write_json
from ecluse.demo.watching import LOOK_SECONDS, Kill, Seen, watch

PRODUCTS, VARIANTS = 50, 10  # in the shop with the tag `first-50`
LONGEST_SECONDS = 120.0
ANOTHER_CLIENT = "merchandising"


def product(number: int) -> str:
    return f"gid://shopify/Product/{number}"


def variant(number: int, place: int) -> str:
    return f"gid://shopify/ProductVariant/{number}{place:02d}"


REFUSED = product(7)  # in the first round
CHANGED_BEFORE = [variant(3, place) for place in range(3)]  # by another client, after the preview
CHANGED_AFTER = [variant(12, place) for place in range(2)]  # by another client, after the apply
ALL = [product(number) for number in range(1, PRODUCTS + 1)]
FAULTS: list[dict[str, object]] = [
    {"vendor": "shopify", "kind": "latency", "seconds": 0.1},
    {"vendor": "shopify", "kind": "refused", "ids": [REFUSED], "status": 422, "code": "invalid", "times": 1},
    {"vendor": "shopify", "kind": "throttle", "ids": ALL[20:22], "retry_after": 1, "per_id_times": 1},
    {"vendor": "shopify", "kind": "applied_then_error", "ids": ALL, "rate": 0.3, "per_id_times": 1},
    {"vendor": "shopify", "kind": "server_error", "ids": ALL, "rate": 0.05, "status": 502, "per_id_times": 1},
]
OVERRIDES = (
    Override("PRICING_REQUESTS_PER_SECOND", "25", "the default would take a minute"),
    Override("PRICING_BURST", "10", "the server is killed before all calls are sent"),
    Override("PRICING_CALL_TIMEOUT_SECONDS", "1", "what became of a lost answer is read back sooner"),
    Override("ECLUSE_ALLOWED_NETWORKS", "127.0.0.0/8", "the shop is simulated on this host"),
    HEARTBEAT,
    DEAD_AFTER,
    QUIET,
)
EXPECTED = {
    "status": "PARTIAL",
    "applied": PRODUCTS * VARIANTS - len(CHANGED_BEFORE),
    "failed": len(CHANGED_BEFORE),
    "conflicts": len(CHANGED_BEFORE),
    "mismatches": len(CHANGED_AFTER),
    "rolled_back": PRODUCTS * VARIANTS - len(CHANGED_BEFORE) - len(CHANGED_AFTER),
    "not_rolled_back": len(CHANGED_AFTER),
    "doubled": 0,
    "lost": 0,
    "verify": "clean",
}
PROGRESS = """
SELECT r.ended_at IS NOT NULL AS ended, count(i.id) AS planned, count(i.id) FILTER (WHERE i.status <> 'open') AS done
FROM runs r LEFT JOIN items i ON i.run_id = r.id WHERE r.id = %s GROUP BY r.id
"""
# What became of each target, by its history, and the prices that it was to get.
BECAME = """
SELECT t.variant_id AS variant, t.before_amount AS before, t.after_amount AS after,
       bool_or(h.to_status = 'APPLIED') AS applied, bool_or(h.to_status = 'ROLLED_BACK') AS rolled_back
FROM rule_targets t JOIN rule_history h ON h.rule_target_id = t.id WHERE t.rule_run_id = %s GROUP BY t.id
"""
CHANGE = """
mutation ($productId: ID!, $variants: [ProductVariantsBulkInput!]!) {
  productVariantsBulkUpdate(productId: $productId, variants: $variants) { userErrors { message } }
}
"""


def run(*, keep: bool, as_json: bool, given: str | None) -> int:
    """Play the demonstration and return the exit code: 0 if every target came out as expected, the shop's ledger
    agrees, and the auditor finds no violation. `keep` leaves server and vendors running at the end; `given` is the
    address of an empty database to use."""
    console = Console(stderr=as_json)
    console.print(
        f"[bold]Ecluse[/] lowers {PRODUCTS * VARIANTS} prices by a tenth, in a shop that throttles, fails and loses "
        "answers, and restores them. The server is killed half-way."
    )
    overrides.show(console, OVERRIDES)
    with scene(overrides.environment(OVERRIDES), FAULTS, given=given) as played:
        key = played.operator_key()
        report = _Play(console, played, key).play()
        _show(console, report)
        if as_json:
            write_json(report)
        if keep:
            page = f"{played.url}/ui/pricing/runs/{report['rule_run']}"
            stay(lambda: what_stays(console, played, key, "the rule run of this demonstration:", f"  {page}"))
    return 0 if as_expected(report) else 1


def as_expected(report: dict[str, Any]) -> bool:
    return all(report[name] == value for name, value in EXPECTED.items())


class _Play:
    def __init__(self, console: Console, played: Scene, key: str) -> None:
        self._console, self._played, self._key = console, played, key
        self._api, self._shop = f"{played.url}/api/pricing", f"{played.vendor}/shopify/unlimited-demo"
        self._began = time.monotonic()

    def play(self) -> dict[str, Any]:
        shop = {"name": "Demo", "connector": "shopify", "base_url": self._shop, "currency": "EUR"}
        project = self._post("/projects", {**shop, "access_token": "shpat_demo"})["id"]
        change = {"selection": {"tags": ["first-50"]}, "change": {"kind": "percent", "percent": "-10"}}
        rule = self._post("/rules", {"project_id": project, "name": "A tenth off", **change})["id"]
        started = self._post("/runs", {"rule_id": rule})
        path = f"/runs/{started['id']}"
        self._wait(started, "preview")
        self._change(product(3), CHANGED_BEFORE)
        started = self._post(f"{path}/queue", {"plan_hash": self._get(path)["plan_hash"]})
        kill = self._watch(int(started["run_id"]))
        self._say(f"first round: {self._counts(path)}")
        self._wait(self._post(f"{path}/retry", {}), "retry")
        self._say(f"failed targets retried: {self._counts(path)}")
        self._change(product(12), CHANGED_AFTER)
        self._wait(self._post(f"{path}/reconcile", {}), "reconciliation")
        found = next(one for one in self._get(f"{path}/reconciliations")["reconciliations"] if one["finished_at"])
        self._say(f"compared with the shop: {found['mismatches']} of {found['checked']} prices are not as applied")
        self._wait(self._post(f"{path}/rollback", {}), "rollback")
        self._say(f"former prices restored: {self._counts(path)}")
        return self._report(int(started["id"]), self._get(path), found, kill)

    def _report(self, run: int, shown: dict[str, Any], found: dict[str, Any], kill: Kill) -> dict[str, Any]:
        became = self._played.query(BECAME, run)
        lines = [one for one in self._played.ledger("shopify", "effect") if one["client"] is None]
        changes = Counter((one["ref"], one["value"]) for one in lines if one["value"] != one["before"])
        wanted = [(one["variant"], one["after"]) for one in became if one["applied"]]
        wanted += [(one["variant"], one["before"]) for one in became if one["rolled_back"]]
        return {
            "rule_run": str(run),
            "status": shown["status"],
            "applied": sum(one["applied"] for one in became),
            "failed": shown["counts"].get("FAILED", 0),
            "conflicts": shown["errors"].get("PRICE_CONFLICT", 0),
            "mismatches": found["mismatches"],
            "rolled_back": shown["counts"].get("ROLLED_BACK", 0),
            "not_rolled_back": shown["not_rolled_back"],
            "ledger_writes": len(lines),
            "doubled": sum(times - 1 for times in changes.values()),
            "lost": sum((ref, f"{cents // 100}.{cents % 100:02d}") not in changes for ref, cents in wanted),
            "seconds": round(time.monotonic() - self._began, 1),
            "seconds_without_worker": round(kill.idle_seconds, 1),
            "verify": self._played.audit(),
        }

    def _watch(self, run: int) -> Kill:
        """Show the progress of the apply until it ends, kill and restart the server half-way, and return the kill."""

        def look() -> Seen:
            (row,) = self._played.query(PROGRESS, run)
            return Seen("applying", row["done"], row["planned"] or None, ended=row["ended"])

        def half_way(seen: Seen) -> bool:
            return 0 < 2 * seen.done >= (seen.total or 0)

        return watch(self._console, self._played, look, kill_when=half_way, longest=LONGEST_SECONDS)

    def _wait(self, started: dict[str, Any], what: str) -> None:
        until = time.monotonic() + LONGEST_SECONDS
        while not self._played.query(PROGRESS, int(started["run_id"]))[0]["ended"]:
            if time.monotonic() > until:
                raise SetUpError(f"The {what} did not end within {LONGEST_SECONDS:.0f} s.")
            time.sleep(LOOK_SECONDS)

    def _change(self, of_product: str, variants: list[str]) -> None:
        """Change prices as another client of the shop."""
        headers = {"X-Shopify-Access-Token": "shpat_other", "X-Client": ANOTHER_CLIENT}
        given = {"productId": of_product, "variants": [{"id": one, "price": "999.00"} for one in variants]}
        asked = {"query": CHANGE, "variables": given}
        post(f"{self._shop}/admin/api/2026-10/graphql.json", asked, headers=headers)
        self._say(f"another client changes {len(variants)} prices in the shop")

    def _counts(self, path: str) -> str:
        shown = self._get(path)
        return f"{shown['status']}, " + ", ".join(f"{n} {status}" for status, n in sorted(shown["counts"].items()))

    def _say(self, text: str) -> None:
        self._console.print(f"{time.monotonic() - self._began:5.1f} s  {text}", highlight=False, soft_wrap=True)

    def _post(self, path: str, body: object) -> dict[str, Any]:
        answer: dict[str, Any] = post(self._api + path, body, self._key)
        return answer

    def _get(self, path: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(get(self._api + path, self._key))
        return answer


def _show(console: Console, report: dict[str, Any]) -> None:
    """Print the report as readable lines."""
    lines = (
        f"rule run {report['rule_run']}: {report['applied']} prices applied, {report['rolled_back']} of them restored",
        f"  changed by another client and left: {report['conflicts']} before apply, {report['not_rolled_back']} after",
        f"  the shop's ledger: {report['ledger_writes']} writes, {report['doubled']} twice, {report['lost']} missing",
        f"  one kill -9: work resumed after {report['seconds_without_worker']} s; {report['seconds']} s in all",
        f"  verify: {audited(report)}",
    )
    for one in lines:
        console.print(one, highlight=False, soft_wrap=True)
