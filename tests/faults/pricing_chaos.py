"""One large apply of a rule run while its replicas are killed at random, in a shop that applies prices and says that it
did not: by the shop's ledger no price is changed twice, none is lost, and nothing is reported that is not so.

`make chaos-pricing KILLS=50 TARGETS=5000 SEED=1 JSON=1`. A test plays the same with smaller numbers.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.chaos import LYING, MANY_KILLS, OneRun, Plan, Report, slow
from tests.faults.postgres import own_postgres
from tests.faults.subjects import PRICING
from tests.faults.world import World, open_world
from tests.support.fork_server import running_fork_server

RULE_RUN = "SELECT status FROM rule_runs"
BY_STATUS = "SELECT status, count(*) AS n FROM rule_targets GROUP BY 1"


@dataclass
class Account(Report):
    status: str = ""
    statuses: dict[str, int] | None = None  # targets of the rule run

    def problems(self) -> list[str]:
        expected = {
            f"{self.plan.kills} kills, not {self.kills}": self.kills == self.plan.kills or self.kills < MANY_KILLS,
            f"an APPLIED rule run, not {self.status}": self.status == "APPLIED",
            f"{self.plan.targets} APPLIED targets, not {self.statuses}": self.statuses
            == {"APPLIED": self.plan.targets},
            "a shop that lied": self.tally.faults.get("applied_then_error", 0) > 0,
            "items in flight at a killed replica": bool(self.take_overs) or self.kills < MANY_KILLS,
            f"no replica that exited without being killed, not: {self.exited}": not self.exited,
        }
        return [*self.tally.problems(), *(f"expected {what}" for what, seen in expected.items() if not seen)]

    def as_json(self) -> dict[str, Any]:
        figures = super().as_json()
        names = ("kills", "effects", "wanted", "lost", "doubled", "false_outcomes", "late_writes", "unknown", "sends",
                 "spoilt_answers", "takeovers", "takeover_p50_s", "takeover_p99_s", "replicas_exited", "seconds",
                 "seed", "verify")  # fmt: skip
        return {"targets": self.plan.targets, "status": self.status, **{name: figures[name] for name in names}}


class Priced(OneRun):
    def __init__(self, world: World, plan: Plan, *, quiet: bool) -> None:
        super().__init__(world, plan, quiet=quiet)
        self.report: Account = Account(plan)

    def play(self) -> Account:
        world, plan, report = self.world, self.plan, self.report
        world.watch_claims()
        world.sandbox.set_faults([LYING, slow(0.1), slow(0.4, rate=0.1)])
        world.start_replicas(plan.replicas)
        self.killed(plan.targets)
        report.tally = world.tally()
        report.status = world.one(RULE_RUN)
        report.statuses = {row["status"]: row["n"] for row in world.ask(BY_STATUS)}
        return report


def play(world: World, plan: Plan, *, quiet: bool = False) -> Account:
    return Priced(world, plan, quiet=quiet).play()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.pricing_chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--targets", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args(argv)
    plan = Plan(kills=args.kills, seed=args.seed, targets=args.targets, patience=900.0)
    folder = Path(tempfile.mkdtemp(prefix="ecluse-chaos-"))
    try:
        with (
            own_postgres(folder) as postgres,
            running_fork_server(folder) as fork_server,
            # The program's own heartbeat: what is measured is what an operator gets.
            open_world(PRICING, postgres, fork_server, folder, heart={}, seed=args.seed) as world,
        ):
            report = play(world, plan)
            problems = report.problems()
            rows = {name: value for name, value in report.as_json().items() if name != "verify"}
            lines = [f"  {name:<16} {value}" for name, value in rows.items()]
            verdict = [*problems, world.diagnosis()] if problems else ["all is well, and the auditor agrees"]
            sys.stdout.write("\n".join([f"pricing under {args.kills} kills", *lines, "", *verdict]) + "\n")
            if args.json:
                sys.stdout.write(json.dumps(report.as_json()) + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
