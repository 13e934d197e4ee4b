"""One claimed attempt at a job: its lease, its log and its end. Two threads share it: one runs the program, the other
renews the lease and sends the log."""

from __future__ import annotations

import threading
import time
from typing import Any

from ecluse.agent.job_types import Rejected, program_of
from ecluse.agent.processes import Ended, Running
from ecluse.agent.server import Away, Backoff, Refused, Server
from ecluse.agent.settings import JobType

LOG_SECONDS = 0.5
CHUNK = 16_384  # characters, so that a chunk has at most 64 KiB
TAIL = 2_000  # characters of the output that the result repeats
MARGIN = 5.0  # seconds before the end of a lease at which its job is stopped
REASONS = {
    "CANCELLED": "The job was cancelled.",
    "LEASE_LOST": "The lease could not be renewed; the job was stopped before its end.",
    "TIMEOUT": "The job took longer than its time limit.",
    "AGENT_STOPPED": "The agent was stopped while the job was running.",
    "AGENT_RESTARTED": "The agent ended while the job was running; what was left of it was killed.",
}


class Attempt:
    """`held_until`: the instant of this host's monotonic clock until which the lease is certainly held."""

    def __init__(self, server: Server, types: dict[str, JobType], claimed: dict[str, Any], held_until: float) -> None:
        self.run_id, self.fence = str(claimed["jobRunId"]), int(claimed["fence"])
        self._server, self._types, self._claimed = server, types, claimed
        self._lease, self._held_until = float(claimed["leaseSeconds"]), held_until
        self._stop: str | None = None
        self._over, self._lock = threading.Event(), threading.Lock()
        self._unsent, self._sent, self._room, self._tail = "", 0, 0, ""

    def run(self) -> dict[str, Any]:
        """Run the job; return what is to be reported: the result, and the part of the log that was not sent."""
        keeping = threading.Thread(target=self._keep)
        keeping.start()
        result = self._result()
        self._over.set()
        keeping.join()
        return to_report(self.fence, result, self._sent, self._unsent)

    def stop(self, reason: str) -> None:
        """Stop the job, with this reason unless it is being stopped already."""
        self._stop = self._stop or reason

    def _result(self) -> dict[str, Any]:
        name = self._claimed["type"]
        try:
            program = program_of(self._types, name, self._claimed["payload"])
            allowed, margin = self._types[name], min(MARGIN, self._lease / 6)
            self._room = allowed.output_limit
            ends_at = time.monotonic() + min(allowed.timeout_seconds, self._claimed["timeoutSeconds"] or float("inf"))
            running = Running(program, self.run_id, self._write)
            return self._judged(running.follow(lambda: self._must_stop(time.monotonic(), ends_at, margin), margin / 2))
        except Rejected as error:
            return failed(error.code, str(error))
        except OSError as error:
            return failed("START_FAILED", f"The program cannot be started: {error}")

    def _must_stop(self, now: float, ends_at: float, margin: float) -> str | None:
        if self._stop is None and now >= self._held_until - margin:
            return "LEASE_LOST"
        return self._stop or ("TIMEOUT" if now >= ends_at else None)

    def _judged(self, ended: Ended) -> dict[str, Any]:
        facts = {"exitCode": ended.exit_code, "output": self._tail}
        if ended.stopped is not None:
            return failed(ended.stopped) | facts
        if ended.exit_code == 0:
            return {"status": "succeeded"} | facts
        by = f"signal {-ended.exit_code}" if ended.exit_code < 0 else f"exit code {ended.exit_code}"
        return failed("EXIT_CODE", f"The program ended with {by}.") | facts

    def _write(self, text: str) -> None:
        text = text.replace("\0", "\ufffd")
        with self._lock:
            kept = text[: self._room]
            if len(kept) < len(text) and self._room:
                kept += "\n[further output is not kept]\n"
            self._room = max(0, self._room - len(text))
            self._unsent += kept
            self._tail = (self._tail + kept)[-TAIL:]

    def _keep(self) -> None:
        """Renew the lease at a third of it, sooner after a failure, and send the log, until the job is over."""
        backoff = Backoff(longest=self._lease / 10)
        renew_at = time.monotonic() + self._lease / 3
        while not self._over.wait(min(LOG_SECONDS, max(0.0, renew_at - time.monotonic()))):
            try:
                if time.monotonic() >= renew_at:
                    self._renew()
                    renew_at = time.monotonic() + self._lease / 3
                    backoff.reset()
                self._send_log()
            except Away:
                renew_at = time.monotonic() + backoff.pause()
            except Refused as error:
                return self.stop("LEASE_LOST" if error.code == "LEASE_LOST" else "AGENT_STOPPED")
        return None

    def _renew(self) -> None:
        sent = time.monotonic()
        answer = self._call("renew", {})
        self._held_until = sent + float(answer["leaseSeconds"])
        if answer["cancel"]:
            self.stop("CANCELLED")

    def _send_log(self) -> None:
        """Send whole lines, so that the server finds secrets in them; a long line is cut."""
        with self._lock:
            text = self._unsent[:CHUNK]
        text = text[: text.rfind("\n") + 1] or (text if len(text) == CHUNK else "")
        if text:
            self._call("logs", {"offset": self._sent, "text": text})
            self._sent += len(text)
            with self._lock:
                self._unsent = self._unsent[len(text) :]

    def _call(self, what: str, body: dict[str, Any]) -> dict[str, Any]:
        path = f"/api/agent/job-runs/{self.run_id}/{what}"
        return self._server.call(path, {"fence": self.fence, **body}, self._lease / 3)


def failed(code: str, message: str | None = None) -> dict[str, Any]:
    return {"status": "failed", "errorCode": code, "error": message or REASONS[code]}


def to_report(fence: int, result: dict[str, Any], offset: int = 0, log: str = "") -> dict[str, Any]:
    return {"fence": fence, "result": result, "offset": offset, "log": log}
