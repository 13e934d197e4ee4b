"""The control routes under ``/_sandbox/``: the ledger, the fault rules, the rate caps, health and reset.

Calls to these routes are neither recorded nor subject to faults.
"""

from __future__ import annotations

import json

from aiohttp import web

from ecluse.sandbox.faults import RuleError
from ecluse.sandbox.state import Sandbox
from ecluse.sandbox.vendor import Answer, json_answer
from ecluse.sandbox.vendors import VENDORS


async def control(sandbox: Sandbox, request: web.BaseRequest) -> Answer:
    """Answer a call to a control route; 400, with the reason, for a bad rule, number or JSON text."""
    body = await request.content.read()
    try:
        return route(sandbox, request, body)
    except ValueError as error:  # a bad rule, number or JSON text
        return json_answer({"error": str(error)}, 400)


def route(sandbox: Sandbox, request: web.BaseRequest, body: bytes) -> Answer:
    """Dispatch a call to its control route and return the answer; 404 if there is no such route."""
    match request.method, request.path.split("/")[2:]:
        case "GET", ["health"]:
            return json_answer({"ok": True, "seed": sandbox.seed, "vendors": list(VENDORS)})
        case "POST", ["reset"]:
            sandbox.reset()
            return json_answer({"ok": True})
        case "GET", ["ledger"]:
            return ledger_page(sandbox, request)
        case "DELETE", ["ledger"]:
            sandbox.ledger.clear()
            return json_answer({"ok": True})
        case "GET", ["stats"]:
            return json_answer(sandbox.ledger.stats())
        case "POST", ["faults"]:
            return json_answer({"faults": [rule.as_json() for rule in sandbox.faults.add(json.loads(body))]})
        case "GET", ["faults"]:
            return json_answer({"faults": [rule.as_json() for rule in sandbox.faults.rules]})
        case "DELETE", ["faults"]:
            sandbox.faults.clear()
            return json_answer({"ok": True})
        case "DELETE", ["faults", rule_id]:
            if not sandbox.faults.remove(int(rule_id)):
                return json_answer({"error": f"there is no fault rule {rule_id}"}, 404)
            return json_answer({"ok": True})
        case "POST", ["limits"]:
            sandbox.limits.add(json.loads(body))
            return json_answer({"limits": [limit.given for limit in sandbox.limits.limits]})
        case "DELETE", ["limits"]:
            sandbox.limits.clear()
            return json_answer({"ok": True})
        case _:
            return json_answer({"error": f"there is no {request.method} {request.path}"}, 404)


def ledger_page(sandbox: Sandbox, request: web.BaseRequest) -> Answer:
    """Answer a request for entries of the ledger, by the filters in its query."""
    query = request.query
    limit = int(query["limit"]) if query.get("limit") else None
    if limit is not None and limit < 0:
        raise RuleError("limit: must be 0 or more")
    page = sandbox.ledger.page(
        query.get("vendor") or None, query.get("kind") or None, int(query.get("after") or 0), limit
    )
    ledger = sandbox.ledger
    entries = [entry.as_json() for entry in page]
    return json_answer({"entries": entries, "last_seq": ledger.last_seq, "since": ledger.since})
