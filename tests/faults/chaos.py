"""Chaos: replicas killed at random, again and again, at a vendor that lies about its writes; then the account.

`make chaos KILLS=200 SEED=1 JSON=1`, or several one after the other: `make chaos KILLS=100 SEEDS="1 7 42" SLOW=1`,
where SLOW leaves them one core, at low priority. The tests play the same with smaller numbers.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import quantiles
from typing import Any

from tests.faults import measure
from tests.faults.subjects import SUBJECTS, Subject
from tests.faults.tally import Tally
from tests.faults.world import Replica, World, own_worlds

WRITES = ["PUT", "POST", "PATCH", "DELETE"]
# The vendor does it and says that it did not: a good part of all writes, but no write for ever.
LYING = {"kind": "applied_then_error", "methods": WRITES, "rate": 0.3, "per_id_times": 2}
BURIED = """
SELECT EXISTS (SELECT 1 FROM replicas WHERE id = %s AND state = 'dead')
   AND NOT EXISTS (SELECT 1 FROM claims WHERE replica_id = %s AND in_flight > 0)
"""
DONE = "SELECT count(*) FROM items WHERE status <> 'open'"
SAY_EVERY = 5.0
MANY_KILLS = 20
FED_EVERY = 0.25


def slow(seconds: float, rate: float = 1.0) -> dict[str, Any]:
    """Return a rule of latency, which comes after the vendor has applied the write of a replica killed meanwhile."""
    return {"kind": "latency", "seconds": seconds, "rate": rate}


@dataclass(frozen=True)
class Plan:
    kills: int = 200
    effects: int = 5_000
    replicas: int = 3
    targets: int = 60  # of a run
    open_runs: int = 6
    pause: tuple[float, float] = (0.4, 2.6)  # between kills
    freezes: int = 8  # replicas put to sleep past the heartbeat, besides
    hand_overs: int = 0
    outage: float = 0.0  # seconds without a database
    patience: float = 150.0
    seed: int = 1


@dataclass
class Report:
    plan: Plan
    tally: Tally = field(default_factory=Tally)
    kills: int = 0
    under_fire: int = 0  # effects wanted by runs that were under way while replicas were being killed
    seconds: float = 0.0
    take_overs: list[float] = field(default_factory=list)
    hand_overs: list[measure.HandOver] = field(default_factory=list)
    db_restart_s: float | None = None
    zombie_codes: list[int] = field(default_factory=list)
    suspects: int = 0  # items that something pointed at, though none of them kills its worker
    solo_deaths: int = 0  # while one of them ran alone
    exited: list[str] = field(default_factory=list)  # last words of who left, and not because it was declared dead

    def percentile(self, percent: int) -> float | None:
        if len(self.take_overs) < 2:
            return None
        return round(quantiles(self.take_overs, n=100, method="inclusive")[percent - 1], 2)

    @property
    def few(self) -> bool:
        """A handful of kills may all miss, or come too late: that proves nothing, and is no fault."""
        return self.plan.kills < MANY_KILLS

    def unmet(self, expected: Mapping[str, bool]) -> list[str]:
        """What is wrong by the ledger, and what was expected in one run under kills, besides `expected`."""
        usual = {
            f"{self.plan.kills} kills, not {self.kills}": self.kills == self.plan.kills or self.few,
            "items in flight at a killed replica": bool(self.take_overs) or self.few,
            f"no replica that exited without being killed, not: {self.exited}": not self.exited,
        }
        missing = [what for what, seen in {**usual, **expected}.items() if not seen]
        return [*self.tally.problems(), *(f"expected {what}" for what in missing)]

    def problems(self) -> list[str]:
        """What must not be, and what must have been for the rest to mean anything."""
        plan, tally = self.plan, self.tally
        expected = {
            f"{plan.kills} kills, not {self.kills}": self.kills >= plan.kills,
            f"{plan.effects} effects under fire, not {self.under_fire}": self.under_fire >= plan.effects,
            f"no outcome in doubt, not {tally.unknown}": tally.unknown == 0,
            "a vendor that lied": tally.faults.get("applied_then_error", 0) > 0,
            "items in flight at a killed replica": bool(self.take_overs) or self.kills < MANY_KILLS,
            f"sleepers that leave with code 70, not {self.zombie_codes}": set(self.zombie_codes)
            == ({70} if plan.freezes else set()),
            f"no replica that exited without being killed, not: {self.exited}": not self.exited,
            "hand-overs with code 0": all(one.code == 0 for one in self.hand_overs),
        }
        return [*tally.problems(), *(f"expected {what}" for what, seen in expected.items() if not seen)]

    def as_json(self) -> dict[str, Any]:
        tally = self.tally
        return {
            "kills": self.kills,
            "effects": tally.applied,
            "under_fire": self.under_fire,
            "wanted": tally.wanted,
            "lost": len(tally.lost),
            "doubled": len(tally.doubled),
            "false_outcomes": len(tally.false_outcomes),
            "late_writes": len(tally.late_writes),
            "unended": len(tally.unended),
            "unknown": tally.unknown,
            "sends": tally.sends,
            "spoilt_answers": tally.faults.get("applied_then_error", 0),
            "runs": tally.runs,
            "suspects": self.suspects,
            "solo_deaths": self.solo_deaths,
            "takeovers": len(self.take_overs),
            "takeover_p50_s": self.percentile(50),
            "takeover_p99_s": self.percentile(99),
            "takeover_max_s": round(max(self.take_overs), 2) if self.take_overs else None,
            "zombies": len(self.zombie_codes),
            "handover_s": round(max(one.seconds for one in self.hand_overs), 2) if self.hand_overs else None,
            "db_restart_s": None if self.db_restart_s is None else round(self.db_restart_s, 2),
            "replicas_exited": len(self.exited),
            "seconds": round(self.seconds, 1),
            "seed": self.plan.seed,
            "verify": tally.verify,
        }

    def figures(self, *names: str) -> dict[str, Any]:
        """Return some of the figures that every chaos has, and those that each account ends with."""
        every = Report.as_json(self)
        last = ("late_writes", "takeovers", "takeover_p50_s", "takeover_p99_s", "replicas_exited", "seconds", "seed",
                "verify")  # fmt: skip
        return {name: every[name] for name in (*names, *last)}


class Chaos:
    def __init__(self, world: World, plan: Plan, *, quiet: bool) -> None:
        self.world = world
        self.plan = plan
        self.report = Report(plan)
        self._quiet = quiet
        self._chance = random.Random(plan.seed)  # noqa: S311 - repeatable, not secret
        self._began = time.monotonic()
        self._said_at = self._fed_at = 0.0
        self._taken: list[measure.TakeOver] = []
        self._asleep: list[Replica] = []
        self._naps_owed = 0
        self._ours: set[int] = set()  # pids whose end is our doing

    def play(self) -> Report:
        world, plan, report = self.world, self.plan, self.report
        world.watch_claims()
        world.sandbox.set_faults([LYING, slow(0.1), slow(0.4, rate=0.1)])
        world.start_replicas(plan.replicas)
        naps = {round(n * plan.kills / (plan.freezes + 1)) for n in range(1, plan.freezes + 1)}
        kill_at = time.monotonic() + 1
        while report.kills < plan.kills or self._wanted() < plan.effects:
            self._feed()
            self._wake()
            self._replace()
            self._say()
            if report.kills < plan.kills and time.monotonic() >= kill_at:
                self._kill()
                self._naps_owed += report.kills in naps
                self._put_to_sleep()
                kill_at = time.monotonic() + self._chance.uniform(*plan.pause)
            time.sleep(0.02)
        report.under_fire = self._wanted()
        self._let_end("the last run")
        for _ in range(plan.hand_overs):
            self._hand_over()
        if plan.outage:
            self._restart_database()
        report.tally = world.tally()
        pointed_at = world.ask("SELECT count(*) AS n, sum(solo_deaths) AS died FROM items WHERE suspicion > 0")[0]
        report.suspects, report.solo_deaths = pointed_at["n"], pointed_at["died"] or 0
        report.take_overs = [seconds for one in self._taken if (seconds := one.seconds(world)) is not None]
        report.seconds = time.monotonic() - self._began
        return report

    def _wanted(self) -> int:
        return sum(len(self.world.subject.wanted(target)) for names in self.world.runs.values() for target in names)

    def _feed(self) -> None:
        """There is always work in flight."""
        if time.monotonic() < self._fed_at + FED_EVERY:
            return
        self._fed_at = time.monotonic()
        if len(self.world.runs) - self.world.ended() < self.plan.open_runs:
            self.world.start_run(self.plan.targets)

    def _kill(self) -> None:
        """Kill any replica: busy, idle, or still starting."""
        victim = self._chance.choice([one for one in self.world.living if not one.paused])
        killed_at = self.world.now()
        self._ours.add(victim.child.pid)
        victim.kill()
        self.report.kills += 1
        self._taken += measure.take_overs(self.world, victim, killed_at)
        self.world.start_again(victim)

    def _put_to_sleep(self) -> None:
        """One at a time: the others have to bury it."""
        awake = [one for one in self.world.living if one.is_ready]
        if self._naps_owed and awake and not self._asleep:
            self._naps_owed -= 1
            sleeper = self._chance.choice(awake)
            self._ours.add(sleeper.child.pid)
            sleeper.signal(signal.SIGSTOP)
            self._asleep.append(sleeper)

    def _wake(self) -> None:
        """Who has slept past the heartbeat: declared dead, what it held taken from it."""
        for sleeper in list(self._asleep):
            if self.world.one(BURIED, sleeper.id, sleeper.id):
                self._asleep.remove(sleeper)
                sleeper.signal(signal.SIGCONT)
                self.report.zombie_codes.append(sleeper.child.wait(20))

    def _replace(self) -> None:
        for gone in [one for one in self.world.replicas if not one.lives and not one.replaced]:
            # On a starved machine one may be silent for too long, and is right to leave.
            if gone.child.pid not in self._ours and "was declared dead" not in gone.child.said():
                self.report.exited.append(f"exit code {gone.child.code}: {gone.child.tail()}")
            self.world.start_again(gone)

    def _let_end(self, what: str) -> None:
        def all_ended() -> bool:
            self._wake()
            self._replace()
            self._say()
            return not self._asleep and self.world.ended() == len(self.world.runs)

        self.world.wait_for(all_ended, f"{what} has ended", self.plan.patience)

    def _hand_over(self) -> None:
        """Stop the leader of a run while it has calls in flight that take longer than a stop waits for them."""
        world = self.world
        world.sandbox.set_faults([slow(1.8)])
        world.start_run(4 * self.plan.targets)
        world.wait_for(lambda: all(one.is_ready for one in world.living), "all replicas are up")
        leader = world.wait_for(lambda: measure.leader(world), "a replica leads the run")
        world.wait_until_busy(leader)
        self._ours.add(leader.child.pid)
        self.report.hand_overs.append(measure.hand_over(world, leader))
        world.sandbox.set_faults([])
        self._let_end("the run that was handed over")

    def _restart_database(self) -> None:
        world = self.world
        world.sandbox.set_faults([slow(0.5)])
        # One that is still starting cannot do without it, and says so.
        world.wait_for(lambda: all(one.is_up for one in world.living), "all replicas are up")
        world.start_run(20 * self.plan.targets)
        world.wait_until_busy(items=self.plan.targets)
        self.report.db_restart_s = measure.restart_database(world, "fast", self.plan.outage)
        world.sandbox.set_faults([])
        self._let_end("the run without a database")

    def _say(self) -> None:
        if self._quiet or time.monotonic() < self._said_at + SAY_EVERY:
            return
        self._said_at = time.monotonic()
        row = self.world.ask(
            "SELECT count(*) FILTER (WHERE status = 'succeeded') AS done,"
            " count(*) FILTER (WHERE status = 'open') AS open, max(crashes) AS crashes FROM items"
        )[0]
        sys.stderr.write(
            f"{time.monotonic() - self._began:5.0f} s  {self.report.kills} of {self.plan.kills} kills,"
            f" {self.world.ended()} of {len(self.world.runs)} runs ended, {row['done']} items done, {row['open']} open,"
            f" at most {row['crashes'] or 0} crashes of one\n"
        )


class OneRun(Chaos):
    """One large run. Kills come as its work proceeds: at random, and all of them while it does."""

    def killed(self, work: int) -> int:
        """Play a run of `work` items to its end, and return its id."""
        world, plan, report = self.world, self.plan, self.report
        # From the first items to the last, and a few left over.
        moments = sorted(self._chance.randrange(work // 100, work * 97 // 100) for _ in range(plan.kills))
        run = world.start_run(plan.targets)

        def ended() -> bool:
            self._replace()
            self._say()
            if moments and world.one(DONE) >= moments[0]:
                del moments[0]
                self._kill()
            return world.ended() == 1

        world.wait_for(ended, "the run has ended", plan.patience)
        report.seconds = time.monotonic() - self._began
        report.take_overs = [seconds for one in self._taken if (seconds := one.seconds(world)) is not None]
        return run


def play(world: World, plan: Plan, *, quiet: bool = False) -> Report:
    return Chaos(world, plan, quiet=quiet).play()


def table(report: Report) -> str:
    rows = {name: value for name, value in report.as_json().items() if name != "verify"}
    verdict = report.problems() or ["all is well, and the auditor agrees"]
    return "\n".join(
        [*(f"  {name:<16} {value}" for name, value in rows.items()), "", *(f"  {line}" for line in verdict)]
    )


# Of several reports: which figures a line shows, and of which the largest is the worst.
NAMES = ("kills", "effects", "lost", "doubled", "false_outcomes", "late_writes", "unended", "unknown", "suspects",
         "takeovers", "takeover_p50_s", "takeover_p99_s", "takeover_max_s", "handover_s", "db_restart_s",
         "replicas_exited", "seconds")  # fmt: skip
MOST_IS_BEST = ("kills", "effects", "takeovers")


def line(name: str, figures: dict[str, Any], verdict: str) -> str:
    """One row of the table of several reports."""
    return " ".join([f"{name:>8}", *(f"{figures[name]!s:>{len(name)}}" for name in NAMES), verdict]) + "\n"


def worst(reports: Sequence[Report]) -> dict[str, Any]:
    """The worst of each figure."""
    rows = [report.as_json() for report in reports]
    seen = {name: [row[name] for row in rows if row[name] is not None] for name in NAMES}
    return {name: (min if name in MOST_IS_BEST else max)(seen[name], default=None) for name in NAMES}


def play_once(subject: Subject, plan: Plan, *, several: bool) -> Report:
    """In a world of its own: server, vendor and replicas."""
    with own_worlds(plan.seed) as open_, open_(subject) as world:
        report = play(world, plan)
        if not several:
            sys.stdout.write(f"chaos, seed {plan.seed}\n{table(report)}\n")
        if report.problems():
            stream = sys.stderr if several else sys.stdout
            stream.write("\n".join(["", *report.problems(), world.diagnosis(), ""]))
        return report


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, nargs="+", default=[1], help="several: a line for each, and the worst")
    parser.add_argument("--subject", choices=[one.name for one in SUBJECTS], default=SUBJECTS[0].name)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line; of several, the worst")
    args = parser.parse_args(argv)
    effects = min(Plan.effects, 25 * args.kills)  # a shorter chaos has time for fewer
    plan = Plan(kills=args.kills, effects=effects, hand_overs=3, outage=10.0)
    subject = next(one for one in SUBJECTS if one.name == args.subject)
    several = len(args.seed) > 1
    if several:
        sys.stdout.write(line("seed", {name: name for name in NAMES}, "verdict"))
    reports: list[Report] = []
    for seed in args.seed:
        reports.append(play_once(subject, replace(plan, seed=seed), several=several))
        if several:
            found = reports[-1].problems()
            sys.stdout.write(line(str(seed), reports[-1].as_json(), f"{len(found)} problems" if found else "well"))
            sys.stdout.flush()
    failed = [report.plan.seed for report in reports if report.problems()]
    if several:
        sys.stdout.write(line("worst", worst(reports), f"problems with seeds {failed}" if failed else "all is well"))
    if args.json:
        sys.stdout.write(json.dumps(worst(reports) if several else reports[0].as_json()) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
