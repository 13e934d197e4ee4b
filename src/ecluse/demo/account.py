"""Report of the automation demonstration: outcomes, stages and calls of the run, and the cost of the kill."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from rich.console import Console

from ecluse.demo.scene import Scene, audited, get
from ecluse.demo.watching import Kill

MOST_RECORDINGS = 7
UNREADABLE = "1939-2"  # a recording of a fiche of the first day
VENDORS = ("crm", "elevenlabs", "llm")
CHARGING = ("elevenlabs", "llm")
ORDER = ("successful", "failed", "ignored")
SAMPLE = 5

RETRIES = """
SELECT count(*) AS n FROM attempts a JOIN runs r ON r.id = a.run_id
WHERE %s IN (r.id, r.parent_run_id) AND a.retry_at IS NOT NULL
"""
OUTCOMES = "SELECT target, outcome, error_code, reason FROM outcomes WHERE run_id = %s ORDER BY target"
STAGES = """
SELECT stage, coalesce(units, expected) AS items, extract(epoch FROM ended_at - started_at)::float8 AS seconds
FROM stages WHERE run_id = %s ORDER BY started_at
"""
# Items in flight at a killed replica, and the time until it was declared dead; then, paid calls that were repeated.
TAKEN_OVER = """
SELECT (SELECT count(*) FROM items WHERE crashes > 0) AS items,
       (SELECT extract(epoch FROM max(ended_at) - %s)::float8 FROM replicas WHERE state = 'dead') AS seconds
"""
REPEATED = "SELECT error_code, count(*) AS calls FROM attempts WHERE maybe_paid GROUP BY 1 ORDER BY 1"


def expected(fiche_id: str) -> str:
    """Return the expected error code of a fiche, or `successful`, by the id ranges of the simulated CRM."""
    number = int(fiche_id)
    special = {91: "NO_RECORDINGS", 92: "NO_URL", 93: "NOT_FOUND"}.get(number // 100)
    if special is not None:
        return special
    if number % 8 + 1 > MOST_RECORDINGS:
        return "TOO_MANY_RECORDINGS"
    return "VENDOR_REFUSED" if UNREADABLE.startswith(f"{fiche_id}-") else "successful"


def gather(played: Scene, key: str, run_id: int, kill: Kill, seconds: float) -> dict[str, Any]:
    """Collect the report: the run from the API, its outcomes from the database, the calls from the ledger."""
    run = json.loads(get(f"{played.url}/api/automation/runs/{run_id}", key))
    (retries,) = played.query(RETRIES, run_id)
    outcomes = [{**one, "code": one["error_code"] or one["outcome"]} for one in played.query(OUTCOMES, run_id)]
    first = {one["code"]: one for one in reversed(outcomes)}
    counted = Counter(one["code"] for one in outcomes)
    vendors = {name: _vendor(stats) for name, stats in played.stats().items() if name in VENDORS}
    (taken_over,) = played.query(TAKEN_OVER, kill.at)
    repeated = {row["error_code"]: row["calls"] for row in played.query(REPEATED)}
    charged = Counter(ref for vendor in CHARGING for ref in played.paid(vendor))
    return {
        "run_id": run["id"],
        "status": run["status"],
        "selected": len(outcomes),
        **{name: run[f"{name}_fiches"] for name in ORDER},
        "seconds": round(seconds, 1),
        "retries": retries["n"],
        "outcomes": {
            code: {"fiches": counted[code], "outcome": one["outcome"], "example": _example(one)}
            for code, one in sorted(first.items(), key=lambda pair: (ORDER.index(pair[1]["outcome"]), pair[0]))
        },
        "unexpected": [
            f"fiche {one['target']}: {one['code']}, not {expected(one['target'])} ({one['reason']})"
            for one in outcomes
            if one["code"] != expected(one["target"])
        ],
        "stages": [{**one, "seconds": round(one["seconds"], 1)} for one in played.query(STAGES, run_id)],
        "vendor_calls": sum(one["calls"] for one in vendors.values()),
        "throttled": sum(one["throttled"] for one in vendors.values()),
        "vendors": vendors,
        "kills": 1,
        "kill": {
            "seconds_without_worker": round(kill.idle_seconds, 1),
            "items_taken_over": taken_over["items"],
            "taken_over_after_seconds": round(taken_over["seconds"] or 0.0, 1),
            "paid_calls_repeated": repeated.pop("WORKER_CRASHED", 0),
        },
        "paid_calls_repeated_otherwise": repeated,
        "charged_twice": sum(calls - 1 for calls in charged.values()),
        "verify": played.audit(),
    }


def as_expected(report: dict[str, Any], fiches: int) -> bool:
    """Return True if the run ended `partial` with `fiches` fiches, each has its expected outcome, and the auditor found
    no violation."""
    counted = report["selected"] == fiches == sum(report[name] for name in ORDER)
    ended = report["status"] == "partial" and counted and not report["unexpected"]
    return ended and report["verify"] == "clean"


def _vendor(stats: dict[str, Any]) -> dict[str, int]:
    """Return the counts of one vendor from the sandbox's statistics."""
    answers: dict[str, int] = stats["by_status"]
    return {
        "calls": stats["calls"],
        "throttled": answers.get("429", 0),
        "failed": sum(count for status, count in answers.items() if status.startswith("5")),
        "lost": sum(stats["by_fault"].get(kind, 0) for kind in ("reset", "applied_then_reset")),
    }


def _example(one: dict[str, Any]) -> str | None:
    """Return the fiche and reason of an outcome as text; None if it has no reason."""
    return f"fiche {one['target']}: {one['reason']}" if one["reason"] else None


def show(console: Console, report: dict[str, Any]) -> None:
    """Print the report as readable lines."""

    def line(text: str = "", style: str | None = None) -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    line()
    line(f"run {report['run_id']}: {report['status']} in {report['seconds']} s", "bold")
    counts = " + ".join(f"{report[name]} {name}" for name in ORDER)
    line(f"  {report['selected']} selected = {counts}")
    for code, one in report["outcomes"].items():
        reason = "" if code == one["outcome"] else f"  {code}"
        line(f"    {one['fiches']:>5}  {one['outcome']}{reason}{_brackets(one['example'])}")
    for one in report["unexpected"][:SAMPLE]:
        line(f"    unexpected: {one}", "red")
    stages = (f"{one['stage']} {one['seconds']} s ({one['items']})" for one in report["stages"])
    line(f"  stages      {', '.join(stages)}")
    for name, one in report["vendors"].items():
        refused = ", ".join(f"{one[what]} {what}" for what in ("throttled", "failed", "lost") if one[what])
        line(f"  {name:<11} {one['calls']} calls{_brackets(refused)}")
    line(f"  retries     {report['retries']}")
    kill = report["kill"]
    line(
        f"  one kill    {kill['seconds_without_worker']} s without a worker; {kill['items_taken_over']} items in flight"
        f" taken over after {kill['taken_over_after_seconds']} s; {kill['paid_calls_repeated']} paid calls repeated"
    )
    otherwise = ", ".join(f"{calls} after {code}" for code, calls in report["paid_calls_repeated_otherwise"].items())
    line(
        f"  paid calls  repeated for other reasons than the kill: {otherwise or 'none'}; charged twice according to the"
        f" ledger of the vendors: {report['charged_twice']}"
    )
    line(f"  verify      {audited(report)}", "green" if report["verify"] == "clean" else "red")


def _brackets(text: str | None) -> str:
    return f"  ({text})" if text else ""
