"""Shopify's GraphQL Admin API: ``POST /{shop}/admin/api/{version}/graphql.json``. Documents are really executed, on a
catalogue of 10,000 variants per shop (``sandbox/shop.py``).

The part of the shop's name before the first dash is its plan, and decides its cost bucket: ``standard`` (1,000 points,
50 restored per second), ``advanced`` (2,000, 100), ``plus`` (10,000, 500), or ``unlimited``. The bucket is shared by
all calls to one shop. Tokens: any, but an empty one or ``invalid`` is refused (401), and one that begins with
``read-only`` may not write. Each saved variant is one effect in the ledger; a call is about the product that the
variable ``productId`` names, or the only one of ``ids``. Rate caps, 402, 423, 429 and 5xx come from caps and rules.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from typing import Any

from graphql import ExecutionResult, GraphQLError, OperationType, execute_sync

from ecluse.sandbox.graphql_cost import actual_cost, document, requested_cost
from ecluse.sandbox.shop import SCHEMA, Shop
from ecluse.sandbox.vendor import Answer, Call, json_answer

ROUTE = re.compile(r"/([a-z0-9-]{1,60})/admin/api/(20[0-9]{2}-[0-9]{2}|unstable)/graphql\.json")
PLANS = {
    "standard": (1_000.0, 50.0),
    "advanced": (2_000.0, 100.0),
    "plus": (10_000.0, 500.0),
    "unlimited": (10_000_000.0, 10_000_000.0),
}
LARGEST_QUERY = 1_000  # points, whatever the plan
MESSAGES = {
    401: "[API] Invalid API key or access token (unrecognized login or wrong password)",
    402: "Unavailable Shop",
    404: "Not Found",
    423: "Locked",
    429: "Exceeded 2 calls per second for api client. Reduce request rates to resume uninterrupted service.",
}


@dataclass(slots=True)
class Bucket:
    """The cost bucket of one shop."""

    largest: float
    restore: float
    points: float
    at: float

    def fill(self, now: float) -> None:
        self.points = min(self.largest, self.points + (now - self.at) * self.restore)
        self.at = now

    def as_json(self) -> dict[str, float]:
        return {
            "maximumAvailable": self.largest,
            "currentlyAvailable": float(int(self.points)),
            "restoreRate": self.restore,
        }


class Shopify:
    """The simulated shops, by name."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._shops: dict[str, tuple[Shop, Bucket]] = {}

    def ref(self, call: Call) -> str | None:
        given = request_of(call)
        variables = given["variables"] if given is not None else {}
        ids = variables.get("ids")
        if isinstance(ids, list) and len(ids) == 1:
            return str(ids[0])
        product = variables.get("productId")
        return product if isinstance(product, str) else None

    def error(self, status: int, code: str, message: str) -> Answer:  # noqa: ARG002 - its errors have no codes
        return json_answer({"errors": MESSAGES.get(status, message)}, status)

    def handle(self, call: Call) -> Answer:
        route = ROUTE.fullmatch(call.path)
        if route is None or route[1].partition("-")[0] not in PLANS:
            return self.error(404, "not_found", "Not Found")
        if call.method != "POST":
            return self.error(405, "method_not_allowed", "Method Not Allowed")
        token = call.headers.get("X-Shopify-Access-Token", "")
        if token in ("", "invalid"):
            return self.error(401, "unauthorized", "")
        given = request_of(call)
        if given is None:
            return self.error(400, "bad_request", "Required parameter missing or invalid")
        answer = self._execute(call, *self._shop(route[1]), given, writes=not token.startswith("read-only"))
        answer.headers |= {"X-Request-Id": f"{call.entry.seq:08x}", "X-Shopify-API-Version": route[2]}
        return answer

    def _shop(self, name: str) -> tuple[Shop, Bucket]:
        found = self._shops.get(name)
        if found is None:
            largest, restore = PLANS[name.partition("-")[0]]
            found = self._shops[name] = (Shop(name, self._seed), Bucket(largest, restore, largest, time.monotonic()))
        found[1].fill(time.monotonic())
        return found

    def _execute(self, call: Call, shop: Shop, bucket: Bucket, given: dict[str, Any], *, writes: bool) -> Answer:
        asked = document(SCHEMA, given["query"])
        if asked.errors or asked.parsed is None or asked.operation is None:
            return json_answer({"errors": asked.errors})
        if asked.operation.operation is OperationType.MUTATION and not writes:
            return refused("Access denied. Required access: `write_products` access scope.", "ACCESS_DENIED")
        try:
            cost = requested_cost(SCHEMA, asked.operation, given["variables"])
        except GraphQLError as error:  # a variable is missing
            return json_answer({"errors": [dict(error.formatted)]})
        if cost > LARGEST_QUERY:
            text = f"Query cost is {cost}, which exceeds the single query max cost limit ({LARGEST_QUERY})."
            return refused(text, "MAX_COST_EXCEEDED", cost={"requestedQueryCost": cost})
        if cost > bucket.points:
            throttled = {"requestedQueryCost": cost, "actualQueryCost": None, "throttleStatus": bucket.as_json()}
            return refused("Throttled", "THROTTLED", cost=throttled)
        done = execute_sync(SCHEMA, asked.parsed, shop, call.effect, given["variables"])
        if not isinstance(done, ExecutionResult):
            raise TypeError("the schema has no incremental delivery")
        spent = actual_cost(asked.operation, done.data) if done.data is not None else 1
        bucket.points -= spent
        result: dict[str, Any] = {"data": done.data} if done.data is not None else {}
        if done.errors:
            result["errors"] = [dict(error.formatted) for error in done.errors]
        spending = {"requestedQueryCost": cost, "actualQueryCost": spent, "throttleStatus": bucket.as_json()}
        return json_answer({**result, "extensions": {"cost": spending}})


def refused(message: str, code: str, **extensions: Any) -> Answer:
    """Return a refusal as Shopify sends it: status 200, with `errors` and without `data`."""
    error = {"message": message, "extensions": {"code": code}}
    return json_answer({"errors": [error], **({"extensions": extensions} if extensions else {})})


def request_of(call: Call) -> dict[str, Any] | None:
    """Parse a request: its document and its variables; None if it has no document."""
    try:
        given = json.loads(call.body)
    except ValueError:
        return None
    if not isinstance(given, dict) or not isinstance(given.get("query"), str):
        return None
    variables = given.get("variables") or {}
    return {"query": given["query"], "variables": variables} if isinstance(variables, dict) else None
