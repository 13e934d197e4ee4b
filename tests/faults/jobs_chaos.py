"""Job schedules whose replicas and agents are killed at random. The jobs themselves write down when they begin and end,
and that is held against the database: each fire has made one job, no execution is without its JobRun, no result that an
agent had kept is lost.

`make chaos-jobs KILLS=100 JOBS=1000 SEED=1 JSON=1`. A test plays the same with smaller numbers.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import psycopg

from ecluse.access.agents import new_token
from ecluse.demo.fleet import Agent, Proxy
from tests.faults.chaos import SAY_EVERY, Chaos, Plan, Report
from tests.faults.command import command, in_one_world
from tests.faults.subjects import Subject
from tests.faults.world import World
from tests.support.job_rows import add_schedule, add_server

HOSTS = 4
AGENT_FILE = 'slots = 8\n[shell]\nallow = ["/bin/sh *"]\n'
OFFERED_WITHIN = 15.0  # seconds after the lease of a lost agent
SCRIPT = (
    """note() {{ echo "$1 $ECLUSE_JOB_RUN_ID $(date +%s.%N)" >> {witness}; }}; note begin; sleep {seconds}; note end"""
)
# Due since the last full minute, and not again within the hour.
MAKE_DUE = """
UPDATE schedules SET next_due_at = %(due)s, handled_until = %(due)s - interval '1 minute' WHERE id = ANY(%(ids)s)
"""
FIRES = """
SELECT d.id, d.run_count, (SELECT count(*) FROM jobs j WHERE j.job_schedule_id = d.id) AS jobs,
       (SELECT array_agg(s.state) FROM schedule_slots s WHERE s.schedule_id = d.schedule_id) AS slots
FROM job_schedules d
"""
ATTEMPTS = """
SELECT r.id, r.job_id, r.attempt, r.status, r.late_status, r.error_code, r.agent_id IS NOT NULL AS claimed,
       r.log_length, j.status AS job_status
FROM job_runs r JOIN jobs j ON j.id = r.job_id ORDER BY r.job_id, r.attempt
"""
OPEN = "SELECT count(*) AS jobs, count(*) FILTER (WHERE ended_at IS NULL) AS open FROM jobs"
# Attempts that a sweep has ended, and from the end of their leases until the next one could be claimed.
OFFERED = """
SELECT extract(epoch FROM n.due_at - l.lease_ends_at)::float8 AS seconds FROM job_runs l
JOIN job_runs n ON n.job_id = l.job_id AND n.attempt = l.attempt + 1
WHERE l.error_code = 'LEASE_LOST' AND l.ended_at >= l.lease_ends_at
"""
JOBS = Subject(name="jobs", flow="jobs", given=lambda _: {}, target=str)


class Execution(NamedTuple):
    begun: float
    ended: float | None


@dataclass
class Account(Report):
    agent_kills: int = 0
    schedules: int = 0
    attempts: int = 0
    executions: int = 0
    kept: int = 0  # results that agents had kept, and not reported, when they were killed
    offered: list[float] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    verify: Any = None

    def problems(self) -> list[str]:
        late = [round(one, 1) for one in self.offered if one > OFFERED_WITHIN]
        expected = {
            f"{self.plan.kills} kills, not {self.kills}": self.kills == self.plan.kills,
            f"kills of agents and of replicas, not {self.agent_kills} of agents": 0 < self.agent_kills < self.kills,
            f"lost jobs to be offered again within {OFFERED_WITHIN:.0f} s, not after {late}": not late,
            "jobs that were executing at a killed agent": self.attempts > self.schedules or self.few,
            "a lease that was lost": bool(self.offered) or self.few,
            f"no process that exited without being killed, not: {self.exited}": not self.exited,
            f"a clean audit, not {self.verify}": self.verify == "clean",
        }
        return [*self.found, *(f"expected {what}" for what, seen in expected.items() if not seen)]

    def as_json(self) -> dict[str, Any]:
        names = ("kills", "agent_kills", "schedules", "attempts", "executions", "kept")
        return {
            **{name: getattr(self, name) for name in names},
            "lost_leases": len(self.offered),
            "offered_again_max_s": round(max(self.offered), 2) if self.offered else None,
            "problems": len(self.problems()),
            "seconds": round(self.seconds, 1),
            "seed": self.plan.seed,
            "verify": self.verify,
        }


class JobsChaos(Chaos):
    def __init__(self, world: World, plan: Plan, *, lease: float, quiet: bool) -> None:
        super().__init__(world, plan, quiet=quiet)
        self.report: Account = Account(plan)
        self._lease = lease
        self._witness = world.folder / "witness"
        self._witness.touch()
        self._proxy = Proxy()
        self._ports: dict[int, int] = {}  # by process
        self._agents: list[Agent] = []
        self._back_at: dict[int, float] = {}  # agents that stay away, by their place in the list
        self._kept: dict[str, str] = {}  # attempt → status

    def play(self) -> Account:
        world, plan, report = self.world, self.plan, self.report
        world.environment["ECLUSE_JOB_LEASE_SECONDS"] = str(self._lease)
        world.start_replicas(plan.replicas)
        world.wait_for(lambda: all(one.is_up for one in world.living), "all replicas answer")
        self._tend()
        with self._fleet():
            for n in range(plan.kills):
                self._feed_jobs(plan.targets * (n + 1) // plan.kills - plan.targets * n // plan.kills)
                self._wait(self._chance.uniform(*plan.pause))
                if self._chance.random() < 0.5:
                    self._kill()
                else:
                    self._kill_agent()
            world.wait_for(self._all_ended, "every job has ended, and every result is reported", plan.patience)
        report.seconds = time.monotonic() - self._began
        self._account()
        report.verify = world.audit()
        return report

    @contextmanager
    def _fleet(self) -> Iterator[None]:
        """Enrol and start an agent per host, before the first kill; end them."""
        try:
            for n, token in enumerate(asyncio.run(self._places())):
                folder = self.world.folder / f"agent{n}"
                folder.mkdir()
                (folder / "token").write_text(token)
                (folder / "agent.toml").write_text(AGENT_FILE)
                self._agents.append(Agent(f"http://127.0.0.1:{self._proxy.port}", folder))
                self._agents[-1].start()
            enrolled = "SELECT count(*) FROM job_agents"
            self.world.wait_for(lambda: self.world.one(enrolled) == HOSTS, "the agents are enrolled")
            yield
        finally:
            for one in self._agents:
                one.kill()
            self._proxy.close()

    async def _places(self) -> list[str]:
        async with await psycopg.AsyncConnection.connect(self.world.dsn, autocommit=True) as connection:
            for n in range(HOSTS):
                await add_server(connection, f"org{n}", _server(n), f"host{n}")
            return [(await new_token(connection, f"org{n}", f"host{n}", "chaos"))[0] for n in range(HOSTS)]

    def _feed_jobs(self, count: int) -> None:
        asyncio.run(self._add_schedules(count))
        self.report.schedules += count

    async def _add_schedules(self, count: int) -> None:
        due = self.world.now().replace(second=0, microsecond=0)
        async with await psycopg.AsyncConnection.connect(self.world.dsn, autocommit=True) as connection:
            ids = []
            for _ in range(count):
                host, seconds = self._chance.randrange(HOSTS), round(self._chance.uniform(0.05, 1.5), 2)
                script = SCRIPT.format(witness=self._witness, seconds=seconds)
                given = {
                    "server_instance_id": _server(host),
                    "cron_expression": f"{due.minute} * * * *",
                    "job_type": "shell",
                    "payload": {"command": ["/bin/sh", "-c", script]},
                    "retry_policy": {"max_retries": 50, "backoff_ms": 0, "backoff_type": "fixed"},
                }
                ids.append((await add_schedule(connection, f"org{host}", **given)).schedule_id)
            await connection.execute(MAKE_DUE, {"due": due, "ids": ids})

    def _kill_agent(self) -> None:
        """Kill an agent: most are started again at once, some only after their leases."""
        here = [n for n in range(HOSTS) if n not in self._back_at]
        place = self._chance.choice(here)
        agent = self._agents[place]
        agent.kill()
        for file in (agent.folder / "state" / "results").glob("[!.]*"):
            if file.suffix != ".new":
                self._kept[file.name] = json.loads(file.read_bytes())["result"]["status"]
        self.report.kills += 1
        self.report.agent_kills += 1
        if len(here) > 1 and self._chance.random() < 0.3:
            self._back_at[place] = time.monotonic() + self._lease * self._chance.uniform(1.0, 1.2)
        else:
            agent.start()

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._tend()
            time.sleep(0.02)

    def _tend(self) -> None:
        """Start what has ended again, and let the agents find the replicas that answer."""
        self._replace()
        self._say()
        for one in self.world.living:
            if one.child.pid not in self._ports and one.is_up:
                self._ports[one.child.pid] = int(next(one.events("server: listening"))["address"][1])
        living = {one.child.pid for one in self.world.living}
        self._proxy.ports = [port for pid, port in self._ports.items() if pid in living]
        for place, agent in enumerate(self._agents):
            if place in self._back_at:
                if time.monotonic() >= self._back_at[place]:
                    del self._back_at[place]
                    agent.start()
            elif agent.process is not None and agent.process.poll() is not None:
                self.report.exited.append(f"agent {place}: {(agent.folder / 'log').read_text()[-500:]}")
                agent.start()

    def _all_ended(self) -> bool:
        self._tend()
        (row,) = self.world.ask(OPEN)
        kept = [file for one in self._agents for file in (one.folder / "state" / "results").iterdir()]
        return not self._back_at and row["jobs"] >= self.report.schedules and not row["open"] and not kept

    def _account(self) -> None:
        report, attempts = self.report, self.world.ask(ATTEMPTS)
        executed = executions(self._witness.read_text())
        report.attempts, report.executions, report.kept = len(attempts), len(executed), len(self._kept)
        report.offered = [row["seconds"] for row in self.world.ask(OFFERED)]
        report.found += [
            f"schedule {row['id']} has slots {row['slots']}, {row['jobs']} jobs, and counts {row['run_count']}"
            for row in self.world.ask(FIRES)
            if (row["slots"], row["jobs"], row["run_count"]) != (["fired"], 1, 1)
        ]
        report.found += contradictions(attempts, executed, self._kept)

    def _say(self) -> None:
        if self._quiet or time.monotonic() < self._said_at + SAY_EVERY:
            return
        self._said_at, (row,) = time.monotonic(), self.world.ask(OPEN)
        sys.stderr.write(
            f"{time.monotonic() - self._began:5.0f} s  {self.report.kills} of {self.plan.kills} kills,"
            f" {row['jobs']} jobs, {row['open']} of them open\n"
        )


def executions(witness: str) -> dict[str, list[Execution]]:
    """Return what the jobs have written, by attempt."""
    begun: dict[str, list[float]] = defaultdict(list)
    ended: dict[str, list[float]] = defaultdict(list)
    for line in witness.splitlines():
        word, run_id, at = line.split()
        (begun if word == "begin" else ended)[run_id].append(float(at))
    return {
        run_id: [Execution(at, ended[run_id].pop(0) if ended[run_id] else None) for at in times]
        for run_id, times in begun.items()
    }


def contradictions(
    attempts: Sequence[Mapping[str, Any]], executed: Mapping[str, Sequence[Execution]], kept: Mapping[str, str]
) -> Iterator[str]:
    """Yield what the rows say, and the jobs or the agents do not confirm."""
    known = {row["id"]: row for row in attempts}
    for run_id, times in executed.items():
        if run_id not in known or not known[run_id]["claimed"]:
            yield f"attempt {run_id} was executed, but no JobRun says so"
        if len(times) > 1:
            yield f"attempt {run_id} was executed {len(times)} times"
    last: dict[str, Execution] = {}
    for row in attempts:
        what = f"attempt {row['attempt']} of job {row['job_id']}"
        done = executed.get(row["id"], [])
        if row["job_status"] != "succeeded":
            yield f"job {row['job_id']} is {row['job_status']}"
        if row["status"] == "succeeded" and not (done and done[0].ended is not None):
            yield f"{what} has succeeded, but did not come to its end"
        for one in done:
            before = last.get(row["job_id"])
            if before is not None and before.ended is not None and before.ended > one.begun:
                yield f"{what} began before the attempt before it had ended"
            last[row["job_id"]] = one
    for run_id, status in kept.items():
        row = known[run_id]
        if status not in (row["status"], row["late_status"]):
            yield f"the result of {run_id}, {status}, is lost: {row['status']} {row['error_code']}"


def _server(place: int) -> str:
    return f"cserver{place:018d}"


def play(world: World, plan: Plan, *, lease: float, quiet: bool = False) -> Account:
    return JobsChaos(world, plan, lease=lease, quiet=quiet).play()


if __name__ == "__main__":
    # The program's own lease: what is measured is what an operator gets.
    played = in_one_world(JOBS, partial(play, lease=30.0))
    sys.exit(command("jobs", __doc__, played, Plan(kills=100, targets=1_000, patience=600.0), things="jobs"))
