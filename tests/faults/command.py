"""The command lines of chaos over a single flow: options, a server of its own, and the report."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

from tests.faults.chaos import Plan, Report
from tests.faults.subjects import Subject
from tests.faults.world import Open, World, own_worlds

Play = Callable[[Open, Plan], Report]


def in_one_world(subject: Subject, play: Callable[[World, Plan], Report]) -> Play:
    """Return a play in one world of the subject; what it looks like is said if the account is wrong."""

    def played(open_: Open, plan: Plan) -> Report:
        with open_(subject) as world:
            report = play(world, plan)
            if report.problems():
                sys.stderr.write(world.diagnosis() + "\n")
            return report

    return played


def command(name: str, description: str | None, play: Play, plan: Plan, *, things: str) -> int:
    """Play with the numbers of the command line, by default those of `plan`, and print the account. `things`: what its
    targets are."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.faults.{name}_chaos", description=description)
    parser.add_argument("--kills", type=int, default=plan.kills)
    parser.add_argument(f"--{things}", type=int, default=plan.targets, dest="targets")
    parser.add_argument("--seed", type=int, default=plan.seed)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    given = Plan(kills=args.kills, seed=args.seed, targets=args.targets, patience=plan.patience)
    with own_worlds(args.seed) as open_:
        report = play(open_, given)
    rows = report.as_json()
    lines = [f"  {row:<28} {value}" for row, value in rows.items() if row != "verify"]
    verdict = report.problems() or ["all is well, and the auditor agrees"]
    sys.stdout.write("\n".join([f"{name} under {args.kills} kills", *lines, "", *verdict]) + "\n")
    if args.json:
        sys.stdout.write(json.dumps(rows) + "\n")
    return 1 if report.problems() else 0
