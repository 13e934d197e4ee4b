"""One large run of automation while its replicas are killed at random, beside the same run without a kill: what became
of each fiche must be the same.

`make chaos-automation KILLS=50 FICHES=1000 SEED=1 JSON=1`. A test plays the same with smaller numbers.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tests.faults.chaos import WRITES, OneRun, Plan, Report, slow
from tests.faults.command import command
from tests.faults.subjects import AUTOMATION
from tests.faults.world import Open, World

REFUSED = [f"{10_000 + n}-1" for n in range(3, 4_000, 97)]
# Every failure heals within the attempts, except that of the recordings that the provider cannot read.
FAULTS: list[dict[str, Any]] = [
    {"kind": "refused", "vendor": "elevenlabs", "ids": REFUSED, "status": 422, "code": "invalid_audio"},
    {"kind": "applied_then_error", "methods": WRITES, "rate": 0.03, "per_id_times": 1},
    {"kind": "server_error", "vendor": "crm", "rate": 0.05, "per_id_times": 1},
    slow(0.1),
    slow(0.6, rate=0.05),
]
OUTCOMES = "SELECT target, outcome, error_code FROM outcomes WHERE run_id = %s"
NOTED = "SELECT error_code, count(*) AS n FROM attempts WHERE maybe_paid GROUP BY 1 ORDER BY 1"
AT_VENDORS = {"AUTOMATION_SEND_EVENT_CHUNK_SIZE": "50"}


def fiche(n: int) -> str:
    """Mostly ordinary ones; of forty, one has no recordings, one a recording without an address, one is unknown."""
    strange = {20: 9_100, 30: 9_200, 39: 9_300}.get(n % 40)
    return str(10_000 + n if strange is None else strange + n // 40)


def bought_for(number: str) -> frozenset[str]:
    """At most: of a fiche that fails, what could be bought."""
    match int(number) // 100:
        case 91 | 93:
            return frozenset()
        case 92:
            return frozenset({f"transcript of {number}-1", f"transcript of {number}-3"})
    return AUTOMATION.wanted(number)


CROWD = replace(
    AUTOMATION,
    target=fiche,
    wanted=bought_for,
    environment=lambda url: {**AUTOMATION.environment(url), **AT_VENDORS},
)
Outcomes = dict[str, tuple[str, str | None]]


@dataclass
class Account(Report):
    fiches: int = 0
    outcomes: Outcomes = field(default_factory=dict)
    expected: Outcomes = field(default_factory=dict)
    quiet_seconds: float = 0.0  # what the same run takes without a kill
    noted: dict[str, int] = field(default_factory=dict)
    paid: Mapping[str, int] = field(default_factory=dict)

    @property
    def otherwise(self) -> list[str]:
        fiches = sorted(self.expected.keys() | self.outcomes.keys())
        return [
            f"{one}: {self.outcomes.get(one)}, not {self.expected.get(one)}"
            for one in fiches
            if self.outcomes.get(one) != self.expected.get(one)
        ]

    def problems(self) -> list[str]:
        expected = {
            f"{self.fiches} fiches with an outcome, not {len(self.outcomes)}": len(self.outcomes) == self.fiches,
            f"the same outcomes as without kills, not: {'; '.join(self.otherwise[:8])}": not self.otherwise,
        }
        return self.unmet(expected)

    def as_json(self) -> dict[str, Any]:
        return {
            "kills": self.kills,
            "fiches": self.fiches,
            "outcomes": dict(Counter(" ".join(filter(None, one)) for one in self.outcomes.values())),
            "otherwise": len(self.otherwise),
            "bought": self.tally.applied,
            "lost": len(self.tally.lost),
            "paid": dict(self.paid),
            "paid_twice": self.tally.paid_twice,
            "paid_twice_unnoted": len(self.tally.doubled),
            "noted": self.noted,
            "seconds_without_kills": round(self.quiet_seconds, 1),
            **self.figures(),
        }


class Automated(OneRun):
    def __init__(self, world: World, plan: Plan, *, quiet: bool) -> None:
        super().__init__(world, plan, quiet=quiet)
        self.report: Account = Account(plan, fiches=plan.targets)

    def play(self) -> Account:
        world, plan, report = self.world, self.plan, self.report
        world.watch_claims()
        world.sandbox.set_faults(FAULTS)
        world.start_replicas(plan.replicas)
        names = [CROWD.target(n) for n in range(1, plan.targets + 1)]
        run = self.killed(len(names) + sum(len(CROWD.wanted(name)) for name in names))
        rows = world.ask(OUTCOMES, run)
        report.outcomes = {row["target"]: (row["outcome"], row["error_code"]) for row in rows}
        report.noted = {row["error_code"]: row["n"] for row in world.ask(NOTED)}
        report.paid = Counter(entry["vendor"] for entry in world.sandbox.ledger(kind="paid"))
        return report


def compare(open_: Open, plan: Plan, *, quiet: bool = False) -> Account:
    """First without a kill, then with all of them; each in a world of its own."""
    with open_(CROWD) as world:
        calm = Automated(world, replace(plan, kills=0), quiet=quiet).play()
        row = world.ask("SELECT status, selected, successful, failed, ignored FROM runs WHERE flow = 'automation'")[0]
    with open_(replace(CROWD, expected=lambda _: row)) as world:
        report = Automated(world, plan, quiet=quiet).play()
        report.expected, report.quiet_seconds = calm.outcomes, calm.seconds
        report.tally = world.tally()
        if report.problems() and not quiet:
            sys.stderr.write(world.diagnosis() + "\n")
    return report


if __name__ == "__main__":
    plan = Plan(kills=50, targets=1_000, patience=1_800.0)
    sys.exit(command("automation", __doc__, compare, plan, things="fiches"))
