"""Demonstration of company enrichment: companies that the registers know, know in part, do not know, or fail on; one
that is stored, one that has aged, one that two tenants ask for at once, and one whose server is killed between two
registers. The ledgers of the simulated registers say which calls were made."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console

from ecluse.base.errors import SetUpError
from ecluse.demo import overrides
from ecluse.demo.overrides import DEAD_AFTER, HEARTBEAT, QUIET, Override
from ecluse.demo.scene import Scene, audited, get, post, scene, stay, what_stays, write_json
from ecluse.demo.watching import LOOK_SECONDS, Seen, watch

KNOWN, PARTLY, FAILING = "552049447", "910000009", "552100554"
UNKNOWN, SHARED, KILLED = "900000001", "356000000", "732829320"
SEARCH, INPI, RCS = "API_RECHERCHE_ENTREPRISES", "INPI_RNE", "API_ENTREPRISE_RCS"
LEDGERS = {SEARCH: "recherche_entreprises", INPI: "inpi", RCS: "api_entreprise"}
ALL = dict.fromkeys(LEDGERS, 1)
SECOND = "second"  # tenant
LONGEST_SECONDS = 60.0
FAULTS: list[dict[str, object]] = [
    {"vendor": "recherche_entreprises", "kind": "server_error", "ids": [FAILING], "status": 500},
    {"vendor": "recherche_entreprises", "kind": "latency", "ids": [SHARED], "seconds": 2.5},
    {"vendor": "inpi", "kind": "latency", "ids": [KILLED], "seconds": 3},
]
OVERRIDES = (
    Override("API_ENTREPRISE_PER_MINUTE", "600", "the companies do not wait for each other"),
    HEARTBEAT,
    DEAD_AFTER,
    QUIET,
)
REGISTERS = {
    "RECHERCHE_ENTREPRISES_BASE_URL": "{vendor}/recherche-entreprises",
    "INPI_BASE_URL": "{vendor}/inpi",
    "INPI_USERNAME": "demo@example.org",
    "INPI_PASSWORD": "demo",
    "API_ENTREPRISE_BASE_URL": "{vendor}/api-entreprise",
    "API_ENTREPRISE_TOKEN": "demo",
    "API_ENTREPRISE_RECIPIENT": "13002526500013",
}
FAILED = f"{SEARCH}:500:SERVER_ERROR"
# Per case: the status at the end, the calls of each register, and the error.
EXPECTED = {
    "cold": ("SUCCESS", ALL, None),
    "cached": ("SUCCESS", {}, None),
    "stale": ("SUCCESS", ALL, None),
    "partial": ("PARTIAL", ALL, f"{INPI}:404:NOT_FOUND|{RCS}:404:NOT_FOUND"),
    "failed": ("FAILED", {**ALL, SEARCH: 3}, FAILED),
    "not found": ("FAILED", ALL, f"{SEARCH}:200:NOT_FOUND|{INPI}:404:NOT_FOUND|{RCS}:404:NOT_FOUND"),
    "attached by a second tenant": ("SUCCESS", ALL, None),
    "kill": ("SUCCESS", {**ALL, INPI: 2}, None),
}
AGE = "UPDATE companies SET updated_at = updated_at - interval '31 days' WHERE siren = %s RETURNING siren"
AT_INPI = """
SELECT j.ended_at IS NOT NULL AS ended, count(s.run_id) FILTER (WHERE s.ended_at IS NOT NULL) AS done,
       bool_or(s.source_api = 'INPI_RNE' AND s.ended_at IS NULL) AS at_inpi
FROM enrichment_jobs j LEFT JOIN enrichment_sources s ON s.run_id = j.run_id WHERE j.run_id = %s GROUP BY j.run_id
"""
COMPLETED = """
SELECT DISTINCT tenant_id FROM events_outbox
WHERE event_type = 'CompanyEnrichmentCompleted' AND payload ->> 'job_id' = %s
"""
OPEN = ("PENDING", "RUNNING", "STALE")


def run(*, keep: bool, as_json: bool, given: str | None) -> int:
    """Play the demonstration and return the exit code: 0 if every case came out as expected and the auditor finds no
    violation. `keep` leaves server and registers running at the end; `given` is the address of an empty database to
    use."""
    console = Console(stderr=as_json)
    console.print(
        "[bold]Ecluse[/] asks three public registers for companies: known, stored, aged, missing and failing ones. "
        "The server is killed between two registers."
    )
    overrides.show(console, OVERRIDES)
    with scene({**overrides.environment(OVERRIDES), **REGISTERS}, FAULTS, given=given) as played:
        key = played.operator_key()
        report = _Play(console, played, key).play()
        console.print(f"verify: {audited(report)}; {report['seconds']} s in all", highlight=False, soft_wrap=True)
        if as_json:
            write_json(report)
        if keep:
            stay(lambda: what_stays(console, played, key, "the companies:", f"  {played.url}/ui/requests"))
    return 0 if as_expected(report) else 1


def as_expected(report: dict[str, Any]) -> bool:
    found = {one["case"]: (one["status"], one["sources_called"], one["enrichment_error"]) for one in report["cases"]}
    return found == EXPECTED and report["verify"] == "clean"


class _Play:
    def __init__(self, console: Console, played: Scene, key: str) -> None:
        self._console, self._played, self._key = console, played, key
        self._requests = f"{played.url}/v1/requests"
        self._began = time.monotonic()
        self._cases: list[dict[str, Any]] = []

    def play(self) -> dict[str, Any]:
        self._case("cold", KNOWN, lambda: self._ask(KNOWN))
        self._case("cached", KNOWN, lambda: self._ask(KNOWN))
        self._case("stale", KNOWN, self._aged)
        self._case("partial", PARTLY, lambda: self._ask(PARTLY))
        self._case("failed", FAILING, lambda: self._ask(FAILING))
        self._case("not found", UNKNOWN, lambda: self._ask(UNKNOWN))
        self._case("attached by a second tenant", SHARED, self._shared)
        self._case("kill", KILLED, self._killed)
        seconds = round(time.monotonic() - self._began, 1)
        return {"cases": self._cases, "seconds": seconds, "verify": self._played.audit()}

    def _case(self, case: str, siren: str, ask: Callable[[], dict[str, Any]]) -> None:
        """Play a case, print it and add it to the report: the status in the first answer, the status at the end, and
        the calls made in between."""
        before = self._calls(siren)
        first = ask()
        last = self._ended(first["id"])
        made = {source: calls - before[source] for source, calls in self._calls(siren).items()}
        one = {
            "case": case,
            "company_siren": siren,
            "request": first["id"],
            "answered": first["enrichment_status"],
            "status": last["enrichment_status"],
            "sources_called": {source: calls for source, calls in made.items() if calls},
            "enrichment_error": last["enrichment_error"],
        }
        self._cases.append(one)
        then = "" if one["answered"] == one["status"] else f"{one['answered']}, then "
        calls = ", ".join(f"{source} {n}" for source, n in one["sources_called"].items())
        self._say(f"{case}: {siren} {then}{one['status']}; calls: {calls or 'none'}")
        if one["enrichment_error"]:
            self._say(f"  {one['enrichment_error']}")

    def _ask(self, siren: str, key: str | None = None) -> dict[str, Any]:
        answer: dict[str, Any] = post(self._requests, {"company_siren": siren}, key or self._key)
        return answer

    def _aged(self) -> dict[str, Any]:
        """Make the data of a company a month older, and read a request for it, which starts a job."""
        self._played.query(AGE, KNOWN)
        return self._show(self._cases[0]["request"])

    def _shared(self) -> dict[str, Any]:
        """Ask for a company in a second tenant while the job of the first is open, and print which tenants got the
        event of its end. Raise SetUpError if a second job was started."""
        header = {"Ecluse-Tenant": SECOND}
        post(f"{self._played.url}/api/tenants", {"id": SECOND}, self._key)
        made = post(f"{self._played.url}/api/keys", {"name": "demo", "role": "operator"}, self._key, headers=header)
        first, second = self._ask(SHARED), self._ask(SHARED, made["key"])
        if first["job_id"] != second["job_id"]:
            raise SetUpError(f"Two tenants started two jobs: {first['job_id']} and {second['job_id']}.")
        self._ended(first["id"])
        heard = sorted(row["tenant_id"] for row in self._played.query(COMPLETED, first["job_id"]))
        self._say(f"job {first['job_id']} is shared; its completion event goes to the tenants {', '.join(heard)}")
        return first

    def _killed(self) -> dict[str, Any]:
        """Ask for a company, and kill the server while the second register is being asked."""
        first = self._ask(KILLED)

        def look() -> Seen:
            (row,) = self._played.query(AT_INPI, int(first["job_id"]))
            return Seen("at INPI" if row["at_inpi"] else "enrichment", row["done"], len(ALL), ended=row["ended"])

        def at_inpi(seen: Seen) -> bool:
            return seen.phase == "at INPI"

        watch(self._console, self._played, look, kill_when=at_inpi, longest=LONGEST_SECONDS)
        return first

    def _show(self, request_id: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(get(f"{self._requests}/{request_id}", self._key))
        return answer

    def _ended(self, request_id: str) -> dict[str, Any]:
        """Wait until the job of a request has ended, and return the request. Raise SetUpError after LONGEST_SECONDS."""
        until = time.monotonic() + LONGEST_SECONDS
        while (shown := self._show(request_id))["enrichment_status"] in OPEN:
            if time.monotonic() > until:
                raise SetUpError(f"The job of company {shown['company_siren']} did not end in time.")
            time.sleep(LOOK_SECONDS)
        return shown

    def _calls(self, siren: str) -> dict[str, int]:
        """Return the number of calls about a company by register, from the ledgers of the registers."""
        return {
            source: sum(one["ref"] == siren for one in self._played.ledger(vendor, "call"))
            for source, vendor in LEDGERS.items()
        }

    def _say(self, text: str) -> None:
        self._console.print(f"{time.monotonic() - self._began:5.1f} s  {text}", highlight=False, soft_wrap=True)
