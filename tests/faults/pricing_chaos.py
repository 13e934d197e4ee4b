"""One large apply of a rule run while its replicas are killed at random, in a shop that applies prices and says that it
did not: by the shop's ledger no price is changed twice, none is lost, and nothing is reported that is not so.

`make chaos-pricing KILLS=50 TARGETS=5000 SEED=1 JSON=1`. A test plays the same with smaller numbers.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from tests.faults.chaos import LYING, OneRun, Plan, Report, slow
from tests.faults.command import command, in_one_world
from tests.faults.subjects import PRICING
from tests.faults.world import World

RULE_RUN = "SELECT status FROM rule_runs"
BY_STATUS = "SELECT status, count(*) AS n FROM rule_targets GROUP BY 1"


@dataclass
class Account(Report):
    status: str = ""
    statuses: dict[str, int] | None = None  # targets of the rule run

    def problems(self) -> list[str]:
        targets = {"APPLIED": self.plan.targets}
        expected = {
            f"an APPLIED rule run, not {self.status}": self.status == "APPLIED",
            f"{targets} targets, not {self.statuses}": self.statuses == targets,
            "a shop that lied": self.tally.faults.get("applied_then_error", 0) > 0,
        }
        return self.unmet(expected)

    def as_json(self) -> dict[str, Any]:
        names = (
            "kills",
            "effects",
            "wanted",
            "lost",
            "doubled",
            "false_outcomes",
            "unknown",
            "sends",
            "spoilt_answers",
        )
        return {"targets": self.plan.targets, "status": self.status, **self.figures(*names)}


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


if __name__ == "__main__":
    plan = Plan(kills=50, targets=5_000, patience=900.0)
    sys.exit(command("pricing", __doc__, in_one_world(PRICING, play), plan, things="targets"))
