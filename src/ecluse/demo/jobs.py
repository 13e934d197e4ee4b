"""Demonstration of jobs: 50 schedules of three organisations create jobs for three agents. One agent is killed, one is
cut off, and the server is killed and stays away for 45 minutes. At the end each due time has its decision, each fired
one its job, and each job its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rich.console import Console

from ecluse.base.errors import SetUpError
from ecluse.base.timetable import timetable
from ecluse.demo import overrides
from ecluse.demo.fleet import Agent, Proxy, fleet
from ecluse.demo.overrides import DEAD_AFTER, HEARTBEAT, QUIET, Override
from ecluse.demo.scene import Scene, audited, post, scene, stay, what_stays, write_json
from ecluse.demo.watching import LOOK_SECONDS

SCHEDULES, ORGANISATIONS = 50, ("amber", "birch", "cedar")
KILLED, CUT_OFF, _ = ORGANISATIONS  # whose agent
CRON = "0,10,20 * * * *"
AWAY = timedelta(minutes=45)  # the last due time is then older than the server looks back
LEASE_SECONDS = 4.0
LONGEST_SECONDS = 90.0
AGENT_FILE = "slots = 8\n[noop]\n"  # a job of type backup is refused
OVERRIDES = (
    Override("ECLUSE_JOB_LEASE_SECONDS", f"{LEASE_SECONDS:.0f}", "lost agents are noticed sooner"),
    HEARTBEAT,
    DEAD_AFTER,
    QUIET,
)
EXPECTED = {
    "due": 150,
    "fired": 82,  # all 50 of the first time, 32 of the last
    "skipped": 3,  # of the agent that is cut off: the jobs before are still active
    "missed": 65,  # all of the second time, and 15 that are not to be caught up on
    "jobs": 82,
    "succeeded": 76,
    "failed": 6,  # of type backup
    "unaccounted": 0,
    "verify": "clean",
}
MOVE_CLOCK = """
WITH moved AS (UPDATE clock_offset SET "offset" = %s::timestamptz - clock_timestamp() RETURNING 1)
SELECT pg_notify('ecluse_clock', '') FROM moved
"""
OPEN = """
SELECT count(*) FILTER (WHERE status = 'running' AND tenant_id = %s) AS running,
       count(*) FILTER (WHERE ended_at IS NULL) AS open, count(*) AS jobs FROM jobs
"""
DECIDED = """
SELECT (SELECT count(*) FROM schedule_slots) AS due,
       (SELECT count(*) FROM schedules WHERE error IS NULL AND next_due_at > ecluse_now()) AS armed
"""
SLOTS = """
SELECT s.id, s.created_at, s.cron, s.timezone, l.due_at, l.state FROM schedules s
LEFT JOIN schedule_slots l ON l.schedule_id = s.id
"""
ENDS = """
SELECT j.status, count(DISTINCT j.id) AS jobs, count(*) AS attempts, count(r.late_status) AS late
FROM jobs j JOIN job_runs r ON r.job_id = j.id GROUP BY 1
"""


def run(*, keep: bool, as_json: bool) -> int:
    """Play the demonstration and return the exit code: 0 if all numbers are as expected and the auditor finds no
    violation. `keep` leaves server and agents running at the end."""
    console = Console(stderr=as_json)
    console.print(
        f"[bold]Ecluse[/] hands jobs of {SCHEDULES} schedules to three agents. One is killed, one is cut off; the "
        f"server is killed, too, and away for {AWAY.seconds // 60} minutes, for which the clock of its database is "
        "moved."
    )
    overrides.show(console, OVERRIDES)
    with scene(overrides.environment(OVERRIDES), []) as played:
        key, proxy = played.operator_key(), Proxy(played.port)
        play = _Play(console, played, key, proxy)
        agents = play.set_up()
        with fleet(list(agents.values())):
            report = play.play(agents)
            _show(console, report)
            if as_json:
                write_json(report)
            if keep:
                more = ("the jobs of this demonstration, of one organisation:", f"  {played.url}/ui/jobs")
                stay(lambda: what_stays(console, played, key, *more))
        proxy.close()
    return 0 if as_expected(report) else 1


def as_expected(report: dict[str, Any]) -> bool:
    return all(report[name] == value for name, value in EXPECTED.items())


def schedule(number: int) -> dict[str, Any]:
    """Return the settings of the schedule with this number, without its server."""
    place, organisation = number // len(ORGANISATIONS), ORGANISATIONS[number % len(ORGANISATIONS)]
    given = {"name": f"job {place}", "cronExpression": CRON, "jobType": "backup" if place == 0 else "noop"}
    slow = 1 <= place <= 3
    return {
        **given,
        "payload": {"seconds": 2.5 if slow else 0.05},
        "retryPolicy": {"maxRetries": 0 if place == 0 else 3, "backoffMs": 100},
        "overlap": "skip" if slow and organisation == CUT_OFF else "allow",
        "catchUp": "skip" if 4 <= place <= 8 else "latest",
    }


class _Play:
    def __init__(self, console: Console, played: Scene, key: str, proxy: Proxy) -> None:
        self._console, self._played, self._key, self._proxy = console, played, key, proxy
        self._began = time.monotonic()
        self._hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) + timedelta(hours=2)

    def set_up(self) -> dict[str, Agent]:
        """Create organisations, hosts, servers and schedules; return the agents by organisation."""
        self._move_clock(self._hour - timedelta(minutes=30))  # no due time is near
        agents, servers = {}, {}
        for one in ORGANISATIONS:
            post(f"{self._played.url}/api/tenants", {"id": one, "name": one.capitalize()}, self._key)
            host = self._post(one, "/hosts", {"name": f"{one}-1"})["id"]
            servers[one] = self._post(one, "/servers", {"name": "main", "hostId": host})["id"]
            token = self._post(one, f"/hosts/{host}/token", {})["token"]
            port = self._proxy.port if one == CUT_OFF else self._played.port
            agents[one] = Agent(f"http://127.0.0.1:{port}", _folder(self._played.data / one, token))
        for number in range(SCHEDULES):
            one = ORGANISATIONS[number % len(ORGANISATIONS)]
            self._post(one, "/schedules", {**schedule(number), "serverInstanceId": servers[one]})
        self._say(f"{len(agents)} organisations, each with a host, a server and an agent; {SCHEDULES} schedules")
        return agents

    def play(self, agents: dict[str, Agent]) -> dict[str, Any]:
        self._wait("the agents to enrol", lambda: len(self._played.query("SELECT FROM job_agents")) == len(agents))
        self._move_clock(self._hour - timedelta(seconds=1))
        self._wait("the first due time", lambda: self._jobs(CUT_OFF)["running"] > 0)
        self._proxy.cut()
        self._say(f"first due time: {self._jobs()['jobs']} jobs; the agent of {CUT_OFF} is cut off")
        self._wait(f"a job of {KILLED}", lambda: self._jobs(KILLED)["running"] > 0)
        agents[KILLED].kill()
        agents[KILLED].start()
        self._say(f"kill -9 of the agent of {KILLED}; it is started again")
        self._played.kill_server()
        # After this time every agent has stopped what it could not renew, as it would have by the moved clock.
        time.sleep(LEASE_SECONDS)
        self._move_clock(self._hour + AWAY)
        self._say(f"kill -9 of the server; {AWAY.seconds // 60} minutes later it is started again")
        self._played.start_server()
        self._wait("the missed due times", self._decided)
        self._proxy.mend()
        self._say(f"every due time is decided; the agent of {CUT_OFF} is connected again")
        self._wait("the end of all jobs", lambda: self._jobs()["open"] == 0)
        return self._report()

    def _report(self) -> dict[str, Any]:
        rows = self._played.query(SLOTS)
        until = self._played.query("SELECT ecluse_now() AS now")[0]["now"]
        due = {
            (row["id"], at)
            for row in rows
            for at in timetable(row["cron"], row["timezone"], None, None).latest(row["created_at"], until, 100)[0]
        }
        states = {(row["id"], row["due_at"]): row["state"] for row in rows if row["due_at"]}
        words, ends = list(states.values()), {row["status"]: row for row in self._played.query(ENDS)}
        return {
            "due": len(due),
            **{state: words.count(state) for state in ("fired", "skipped", "missed")},
            "jobs": sum(row["jobs"] for row in ends.values()),
            **{status: ends[status]["jobs"] if status in ends else 0 for status in ("succeeded", "failed")},
            "unaccounted": len(due ^ set(states)) + words.count("failed") + words.count("waiting"),
            "attempts": sum(row["attempts"] for row in ends.values()),
            "late_results": sum(row["late"] for row in ends.values()),
            "seconds": round(time.monotonic() - self._began, 1),
            "verify": self._played.audit(),
        }

    def _jobs(self, organisation: str = "") -> dict[str, Any]:
        return self._played.query(OPEN, organisation)[0]

    def _decided(self) -> bool:
        (row,) = self._played.query(DECIDED)
        return bool(row["due"] >= EXPECTED["due"] and row["armed"] == SCHEDULES)

    def _move_clock(self, to: datetime) -> None:
        self._played.query(MOVE_CLOCK, to)

    def _wait(self, what: str, seen: Callable[[], bool]) -> None:
        until = time.monotonic() + LONGEST_SECONDS
        while not seen():
            if time.monotonic() > until:
                raise SetUpError(f"Waited {LONGEST_SECONDS:.0f} s for {what}.")
            time.sleep(LOOK_SECONDS)

    def _say(self, text: str) -> None:
        self._console.print(f"{time.monotonic() - self._began:5.1f} s  {text}", highlight=False, soft_wrap=True)

    def _post(self, organisation: str, path: str, body: object) -> dict[str, Any]:
        headers = {"Ecluse-Tenant": organisation}
        answer: dict[str, Any] = post(f"{self._played.url}/api/jobs{path}", body, self._key, headers=headers)
        return answer


def _folder(folder: Path, token: str) -> Path:
    folder.mkdir()
    (folder / "token").write_text(token)
    (folder / "agent.toml").write_text(AGENT_FILE)
    return folder


def _show(console: Console, report: dict[str, Any]) -> None:
    """Print the report as readable lines."""
    decided = ", ".join(f"{report[name]} {name}" for name in ("fired", "skipped", "missed"))
    lines = (
        f"{report['due']} due times of {SCHEDULES} schedules: {decided}, {report['unaccounted']} unaccounted for",
        f"  {report['jobs']} jobs: {report['succeeded']} succeeded, {report['failed']} failed (no agent allows backup)",
        f"  {report['attempts']} attempts: {report['attempts'] - report['jobs']} were lost and repeated",
        f"  {report['late_results']} results came too late and are kept as evidence",
        f"  one kill -9 of the server, one of an agent, one agent cut off; {report['seconds']} s in all",
        f"  verify: {audited(report)}",
    )
    for one in lines:
        console.print(one, highlight=False, soft_wrap=True)
