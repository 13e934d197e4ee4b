"""The first demonstration: an embedded PostgreSQL, a flaky simulated vendor, a server that is killed half-way, and at
the end a report in which every selected article has exactly one outcome, checked by the auditor."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console

from ecluse.base.errors import SetUpError
from ecluse.demo import overrides
from ecluse.demo.overrides import DEAD_AFTER, HEARTBEAT, QUIET, Override
from ecluse.demo.scene import Scene, audited, post, scene, stay, write_json
from ecluse.demo.watching import Seen, watch
from ecluse.engine.runs.items import COUNTS

ARTICLES = 2_000
LONGEST_SECONDS = 180
EXAMPLES = Path(__file__).parents[3] / "examples"
FAULTS: list[dict[str, object]] = [
    {"kind": "not_found", "ids": ["SKU-00013", "SKU-00666", "SKU-01313"]},
    {"kind": "unauthorized", "ids": ["SKU-00042"]},
    {"kind": "throttle", "rate": 0.003, "retry_after": 1, "per_id_times": 1},
    {"kind": "server_error", "rate": 0.05, "status": 503},
    {"kind": "reset", "rate": 0.01},
    {"kind": "latency", "seconds": 0.25},
]
OVERRIDES = (
    Override("ECLUSE_HANDS", "100", "slow enough to follow"),
    HEARTBEAT,
    DEAD_AFTER,
    QUIET,
)


def run(*, keep: bool, as_json: bool) -> int:
    """Play the demonstration and return the exit code: 0 if the run ended with an account that the auditor confirms.
    `keep` leaves server and vendor running at the end."""
    if not (EXAMPLES / "hello_flow").is_dir():
        raise SetUpError("The demonstration needs the examples folder: run it in a checkout of the project.")
    console = Console(stderr=as_json)
    console.print(f"[bold]Ecluse[/] reads {ARTICLES} prices at a vendor that throttles, fails and resets connections")
    overrides.show(console, OVERRIDES)
    environment = overrides.environment(OVERRIDES)
    environment |= {"PYTHONPATH": str(EXAMPLES), "PRICE_LIST_URL": "{vendor}/price-list"}
    with scene(environment, FAULTS, arguments=["--flow", "hello_flow:FLOW"]) as played:
        report = _watch(console, played)
        _print(console, report)
        if as_json:
            write_json(report)
        if keep:
            stay(lambda: _print_what_stays(console, played))
    return 0 if report["status"] in ("completed", "partial") and report["verify"] == "clean" else 1


def _print_what_stays(console: Console, played: Scene) -> None:
    console.print(f"\nserver and sandbox run until Ctrl-C. The vendor is at {played.vendor}. Database and log:")
    console.print(f"  {played.psql}", soft_wrap=True)
    console.print(f"  tail -f {played.log}", soft_wrap=True)


def _watch(console: Console, played: Scene) -> dict[str, Any]:
    """Start a run, show its progress to its end, kill the server half-way, and return the report."""
    started = time.monotonic()
    wanted = {"flow": "hello", "key": "hello-demo", "input": {"articles": ARTICLES}}
    run_id = int(post(f"{played.url}/api/runs", wanted, played.operator_key())["run_id"])

    def look() -> Seen:
        (row,) = played.query(PROGRESS, run_id)
        return Seen("reading", int(row["done"]), ARTICLES, ended=row["ended_at"] is not None)

    kill = watch(console, played, look, kill_when=lambda seen: seen.done > ARTICLES * 0.4, longest=LONGEST_SECONDS)
    (report,) = played.query(REPORT, run_id)
    stats = played.stats()["price_list"]
    return {
        **report,
        "verify": played.audit(),
        "run_id": str(run_id),
        "seconds": round(time.monotonic() - started, 1),
        "kills": 1,
        "took_over_after_s": round(kill.idle_seconds, 1),
        "vendor_calls": stats["calls"],
        "throttled": int(stats["by_status"].get("429", 0)),
    }


PROGRESS = f"""
SELECT r.ended_at, (SELECT coalesce(sum(n.succeeded + n.failed + n.ignored), 0)
                    FROM stages s CROSS JOIN LATERAL {COUNTS} n WHERE s.run_id = r.id) AS done
FROM runs r WHERE r.id = %s
"""  # noqa: S608 - our own names
REPORT = """
SELECT r.status, r.selected, r.successful, r.failed, r.ignored,
    (SELECT count(*) FROM attempts a WHERE a.run_id = r.id AND a.retry_at IS NOT NULL) AS retries,
    (SELECT count(*) FROM hello_prices p WHERE p.run_id = r.id) AS prices_stored,
    (SELECT coalesce(jsonb_object_agg(reason, n), '{}') FROM (SELECT coalesce(error_code, 'successful') AS reason,
     count(*) AS n FROM outcomes WHERE run_id = r.id GROUP BY 1) o) AS outcomes
FROM runs r WHERE r.id = %s
"""


def _print(console: Console, report: dict[str, Any]) -> None:
    """Print the report for people."""
    console.print(f"\n[bold]run {report['run_id']}: {report['status']}[/] in {report['seconds']} s")
    console.print(
        f"  selected {report['selected']} = successful {report['successful']} + failed {report['failed']}"
        f" + ignored {report['ignored']}"
    )
    for reason, count in sorted(report["outcomes"].items()):
        console.print(f"    {count:>6}  {reason}")
    console.print(
        f"  vendor calls {report['vendor_calls']}, throttled {report['throttled']}, retries {report['retries']};"
        f" prices stored {report['prices_stored']}"
    )
    console.print(f"  one kill -9: work resumed after {report['took_over_after_s']} s")
    console.print(f"  verify: {audited(report)}")
