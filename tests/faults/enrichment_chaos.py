"""Companies that are enriched at the pace of their registers while replicas are killed at random: each ends in a
terminal state, its events are all there and in order for each tenant, and a kill repeats no more than the calls that
were in flight.

`make chaos-enrichment KILLS=100 COMPANIES=700 SEED=1 JSON=1`. A test plays the same with smaller numbers.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from tests.faults.chaos import DONE, Chaos, Plan, Report, slow
from tests.faults.command import command, in_one_world
from tests.faults.companies import SECOND, registers, wanted_by_second
from tests.faults.subjects import ENRICHMENT
from tests.faults.world import World
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
        expected = {
            f"only terminal states, not {self.statuses}": set(self.statuses) <= set(ENDED),
            f"{self.plan.targets} companies, not {self.statuses}": sum(self.statuses.values()) == self.plan.targets,
            f"events of a job in order, not {self.disordered[:3]}": not self.disordered,
            f"at most {self.in_flight} repeated calls, not {self.repeated}": self.repeated <= self.in_flight,
            f"at most {self.kills} repeated calls, not {self.repeated}": self.repeated <= self.kills or self.few,
            "items in flight at a killed replica": bool(self.in_flight) or self.few,
        }
        return self.unmet(expected)

    def as_json(self) -> dict[str, Any]:
        return {
            "kills": self.kills,
            "companies": self.plan.targets,
            "statuses": self.statuses,
            "events_lost_or_out_of_order": len(self.disordered),
            "calls_repeated": self.repeated,
            "in_flight_at_kills": self.in_flight,
            **self.figures(),
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


if __name__ == "__main__":
    plan = Plan(kills=100, targets=700, patience=1_200.0)
    sys.exit(command("enrichment", __doc__, in_one_world(PACED, play), plan, things="companies"))
