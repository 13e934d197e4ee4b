"""Companies that are enriched at the pace of their registers while replicas are killed at random: each ends in a
terminal state, its events are all there and in order for each tenant, and a kill repeats no more than the calls that
were in flight.

`make chaos-enrichment KILLS=100 COMPANIES=700 SEED=1 JSON=1`. A test plays the same with smaller numbers.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.faults.chaos import DONE, MANY_KILLS, Chaos, Plan, Report, slow
from tests.faults.companies import SECOND, registers, wanted_by_second
from tests.faults.postgres import own_postgres
from tests.faults.subjects import ENRICHMENT
from tests.faults.world import World, open_world
from tests.support.fork_server import running_fork_server
from tests.support.registers import VENDORS

PACE = 14  # calls a second
ENDED = ("SUCCESS", "PARTIAL", "FAILED")
STATUSES = "SELECT siren, enrichment_status AS status FROM companies"
EVENTS = """
SELECT tenant_id AS tenant, payload ->> 'company_siren' AS siren, payload ->> 'source_api' AS source,
       replace(event_type, 'CompanyEnrichment', '') AS kind, (payload ->> 'attempt')::int AS attempt
FROM events_outbox WHERE producer = 'M3' ORDER BY published_seq
"""
UNPUBLISHED = "SELECT count(*) FROM events_outbox WHERE published_seq IS NULL"
# One worker slot per replica: a kill interrupts one call at most, so that a job that repeats more of them shows.
ONE_CALL = {"ECLUSE_HANDS": "1"}
PACED = replace(
    ENRICHMENT,
    environment=lambda url: {**registers(url), "RECHERCHE_ENTREPRISES_PER_SECOND": str(PACE), **ONE_CALL},
)


def out_of_order(rows: Iterable[dict[str, Any]], companies: Iterable[str]) -> list[str]:
    """Return the companies whose events, for the tenant of the job or for one that joined it, are not those of a job:
    Requested, Started for each attempt, one SourceFetched per source in their order, Completed. A new attempt may
    start between two sources."""
    told: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        told[row["tenant"], row["siren"]].append(row)
    wrong = []
    for company in companies:
        mine = told["default", company]
        attempts = [row["attempt"] for row in mine if row["kind"] == "Started"]
        others = [row["source"] or row["kind"] for row in mine if row["kind"] != "Started"]
        good = others == ["Requested", *(str(source) for source in VENDORS), "Completed"]
        good &= attempts == list(range(1, len(attempts) + 1)) != [] and mine[1]["kind"] == "Started"
        of_second = [row["kind"] for row in told[SECOND, company]]
        good &= of_second == (["Requested", "Completed"] if wanted_by_second(company) else [])
        wrong += [] if good else [f"{company}: {[row['kind'] for row in mine]} and {of_second}"]
    return wrong


@dataclass
class Account(Report):
    statuses: dict[str, int] = field(default_factory=dict)
    disordered: list[str] = field(default_factory=list)
    repeated: int = 0  # calls beyond the first of each company and register
    in_flight: int = 0  # items at the replicas that were killed, when they were

    def problems(self) -> list[str]:
        few = self.plan.kills < MANY_KILLS  # they may miss, or come too late
        expected = {
            f"{self.plan.kills} kills, not {self.kills}": self.kills == self.plan.kills or few,
            f"only terminal states, not {self.statuses}": set(self.statuses) <= set(ENDED),
            f"{self.plan.targets} companies, not {self.statuses}": sum(self.statuses.values()) == self.plan.targets,
            f"events of a job in order, not {self.disordered[:3]}": not self.disordered,
            f"at most {self.in_flight} repeated calls, not {self.repeated}": self.repeated <= self.in_flight,
            f"at most {self.kills} repeated calls, not {self.repeated}": self.repeated <= self.kills or few,
            "items in flight at a killed replica": bool(self.in_flight) or few,
            f"no replica that exited without being killed, not: {self.exited}": not self.exited,
        }
        return [*self.tally.problems(), *(f"expected {what}" for what, seen in expected.items() if not seen)]

    def as_json(self) -> dict[str, Any]:
        return {
            "kills": self.kills,
            "companies": self.plan.targets,
            "statuses": self.statuses,
            "events_lost_or_out_of_order": len(self.disordered),
            "calls_repeated": self.repeated,
            "in_flight_at_kills": self.in_flight,
            "late_writes": len(self.tally.late_writes),
            "takeovers": len(self.take_overs),
            "takeover_p50_s": self.percentile(50),
            "takeover_p99_s": self.percentile(99),
            "replicas_exited": len(self.exited),
            "seconds": round(self.seconds, 1),
            "seed": self.plan.seed,
            "verify": self.tally.verify,
        }


class Enriched(Chaos):
    def __init__(self, world: World, plan: Plan, *, quiet: bool) -> None:
        super().__init__(world, plan, quiet=quiet)
        self.report: Account = Account(plan)

    def play(self) -> Account:
        world, plan, report = self.world, self.plan, self.report
        world.watch_claims()
        world.sandbox.set_faults([slow(0.05)])
        world.start_run(plan.targets)  # first: else most of it is done before the first kill
        world.start_replicas(plan.replicas)
        work = len(VENDORS) * plan.targets
        moments = sorted(self._chance.randrange(work // 100, work * 97 // 100) for _ in range(plan.kills))

        def ended() -> bool:
            self._replace()
            self._say()
            if moments and world.one(DONE) >= moments[0]:
                del moments[0]
                self._kill()
            return world.ended() == plan.targets

        world.wait_for(ended, "every job has ended", plan.patience)
        world.wait_for(lambda: world.one(UNPUBLISHED) == 0, "every event is published", plan.patience)
        report.seconds = time.monotonic() - self._began
        report.in_flight = len(self._taken)
        report.take_overs = [seconds for one in self._taken if (seconds := one.seconds(world)) is not None]
        report.statuses = dict(Counter(row["status"] for row in world.ask(STATUSES)))
        companies = [name for names in world.runs.values() for name in names]
        report.disordered = out_of_order(world.ask(EVENTS), companies)
        calls = [(one["vendor"], one["ref"]) for one in world.sandbox.ledger(kind="call") if one["ref"] != "login"]
        report.repeated = len(calls) - len(set(calls))
        report.tally = world.tally()
        return report


def play(world: World, plan: Plan, *, quiet: bool = False) -> Account:
    return Enriched(world, plan, quiet=quiet).play()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.enrichment_chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--companies", type=int, default=700)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args(argv)
    plan = Plan(kills=args.kills, seed=args.seed, targets=args.companies, patience=1_200.0)
    folder = Path(tempfile.mkdtemp(prefix="ecluse-chaos-"))
    try:
        with (
            own_postgres(folder) as postgres,
            running_fork_server(folder) as fork_server,
            # The program's own heartbeat: what is measured is what an operator gets.
            open_world(PACED, postgres, fork_server, folder, heart={}, seed=args.seed) as world,
        ):
            report = play(world, plan)
            problems = report.problems()
            rows = {name: value for name, value in report.as_json().items() if name != "verify"}
            lines = [f"  {name:<28} {value}" for name, value in rows.items()]
            verdict = [*problems, world.diagnosis()] if problems else ["all is well, and the auditor agrees"]
            sys.stdout.write("\n".join([f"enrichment under {args.kills} kills", *lines, "", *verdict]) + "\n")
            if args.json:
                sys.stdout.write(json.dumps(report.as_json()) + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
