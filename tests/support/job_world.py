"""Hosts, servers, jobs and real agents, for tests of jobs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.api_server import Answer, Client
from tests.support.waits import wait_for

CONFIG = """
slots = {slots}
stop_seconds = {stop_seconds}
[noop]
[shell]
allow = ["/bin/sh *", "/bin/echo hello", "/usr/bin/env"]
env = ["JOB_*"]
output_limit = 2000
[http]
allow = ["http://127.0.0.1:{port}/healthz"]
[counted]
run = ["/bin/sh", "-c", "wc -c"]
"""


@dataclass
class Agent:
    """An agent in a process of its own."""

    command: list[str]
    folder: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> Agent:
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(self.command, stderr=log, env={"PATH": os.environ["PATH"]})
        return self

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def ended(self) -> int:
        assert self.process is not None
        return self.process.wait(20)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.ended()

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def kept(self) -> list[str]:
        return [one.name for one in (self.folder / "state" / "results").iterdir()]


@dataclass
class JobWorld:
    """A client with an operator's key, and what was made with it."""

    api: Client
    folder: Path
    agents: list[Agent] = field(default_factory=list)

    def host(self) -> str:
        return str(self.made("/api/jobs/hosts", {"name": f"host {uuid.uuid4()}"})["id"])

    def server(self, host: str) -> str:
        return str(self.made("/api/jobs/servers", {"name": f"server {uuid.uuid4()}", "hostId": host})["id"])

    def schedule(self, host: str, kind: str = "noop", payload: Any = None, **more: Any) -> str:
        given = {"name": "a schedule", "cronExpression": "0 0 1 1 *", "jobType": kind, "payload": payload or {}}
        server = {"serverInstanceId": self.server(host)}
        return str(self.made("/api/jobs/schedules", {**given, **server, **more})["id"])

    def job(self, host: str, kind: str = "noop", payload: Any = None, **more: Any) -> str:
        """A job made by hand, of a schedule of its own."""
        return self.run(self.schedule(host, kind, payload, **more))

    def run(self, schedule: str) -> str:
        return str(self.made(f"/api/jobs/schedules/{schedule}/run", {})["jobId"])

    def made(self, path: str, body: Any) -> Any:
        answer = self.api.post(path, body)
        assert answer.status < 300, answer.body
        return answer.json

    def token(self, host: str) -> str:
        return str(self.made(f"/api/jobs/hosts/{host}/token", {})["token"])

    def shown(self, job: str) -> Any:
        return self.api.get(f"/api/jobs/{job}").json

    def log(self, job: str) -> str:
        return "".join(one["text"] for one in self.api.get(f"/api/jobs/{job}/logs").json["chunks"])

    def until(self, job: str, *statuses: str) -> Any:
        return wait_for(lambda: (found := self.shown(job))["status"] in statuses and found)

    def ended(self, job: str) -> Any:
        return self.until(job, "succeeded", "failed")

    def credential(self, host: str) -> Client:
        """A client with the credential of an agent of this host."""
        about = {"hostname": "here", "version": "1", "platform": "test"}
        answer = self.api.with_key(None).post("/api/agent/enrol", {"token": self.token(host), **about})
        assert answer.status == 201, answer.body
        return self.api.with_key(answer.json["credential"])

    def agent(self, host: str, *, port: int | None = None, slots: int = 4, stop_seconds: int = 20) -> Agent:
        """Start an agent of this host, as the command line does. `port`: where it finds the server."""
        folder = self.folder / uuid.uuid4().hex[:8]
        folder.mkdir()
        (folder / "token").write_text(self.token(host))
        given = CONFIG.format(port=self.api.port, slots=slots, stop_seconds=stop_seconds)
        (folder / "agent.toml").write_text(given)
        options = ["--server", f"http://127.0.0.1:{port or self.api.port}", "--token-file", str(folder / "token")]
        options += ["--config", str(folder / "agent.toml"), "--state", str(folder / "state")]
        agent = Agent([sys.executable, "-m", "ecluse.agent", *options], folder).start()
        self.agents.append(agent)
        return agent

    def close(self) -> None:
        for one in self.agents:
            if one.process is not None and one.process.poll() is None:
                one.kill()


def claim(client: Client, most: int = 1, wait: float = 0, key: str | None = None, **more: Any) -> Answer:
    given = {"max": most, "waitSeconds": wait, "types": [], "version": "1", "claimKey": key or str(uuid.uuid4())}
    return client.post("/api/agent/jobs/claim", {**given, **more})


def report(client: Client, claimed: Any, status: str = "succeeded", **more: Any) -> Answer:
    body = {"fence": claimed["fence"], "status": status, **more}
    return client.post(f"/api/agent/job-runs/{claimed['jobRunId']}/result", body)


def attempts(job: Any) -> list[tuple[int, str, str | None]]:
    return [(one["attempt"], one["status"], one["errorCode"]) for one in job["runs"]]


@contextmanager
def in_background(call: Callable[[], Any]) -> Iterator[list[tuple[Any, float]]]:
    """The result of the call, and how long it took, are there at the end."""
    found: list[tuple[Any, float]] = []
    began = time.monotonic()

    def run() -> None:
        found.append((call(), time.monotonic() - began))

    thread = threading.Thread(target=run)
    thread.start()
    yield found
    thread.join(30)
