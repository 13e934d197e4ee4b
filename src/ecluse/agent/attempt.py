"""One claimed attempt at a job: its lease, its log and its end. Two threads share it: one runs the program, the other
renews the lease and sends the log."""

import threading
import time

from ecluse.agent.job_types import Rejected, program_of
from ecluse.agent.processes import Running
from ecluse.agent.server import Away, Backoff, Json, Refused, Server
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
    def __init__(self, server: Server, types: dict[str, JobType], claimed: Json, held_until: float) -> None:
        self.run_id, self.fence = str(claimed["jobRunId"]), int(claimed["fence"])
        self._server, self._types, self._claimed = server, types, claimed
        # Until then, by this host's monotonic clock, the lease is certainly held.
        self._lease, self._held_until = float(claimed["leaseSeconds"]), held_until
        self._margin, self._ends_at = min(MARGIN, self._lease / 6), float("inf")
        self._stop: str | None = None
        self._over, self._lock = threading.Event(), threading.Lock()
        self._unsent, self._sent, self._room, self._tail = "", 0, 0, ""

    def run(self) -> Json:
        """Run the job; return the report to be sent: its fence, the result, and the part of the log not sent yet."""
        keeping = threading.Thread(target=self._keep)
        keeping.start()
        result = self._result()
        self._over.set()
        keeping.join()
        return {"fence": self.fence, "result": result, "offset": self._sent, "log": self._unsent}

    def stop(self, reason: str) -> None:
        self._stop = self._stop or reason

    def _result(self) -> Json:
        name = self._claimed["type"]
        try:
            program = program_of(self._types, name, self._claimed["payload"])
            allowed, asked = self._types[name], self._claimed["timeoutSeconds"]
            self._room = allowed.output_limit
            self._ends_at = time.monotonic() + min(allowed.timeout_seconds, asked or allowed.timeout_seconds)
            running = Running(program, self.run_id, self._write)
            return self._judged(*running.follow(self._must_stop, self._margin / 2))
        except Rejected as error:
            return failed(error.code, str(error))
        except OSError as error:
            return failed("START_FAILED", f"The program cannot be started: {error}")

    def _must_stop(self) -> str | None:
        now = time.monotonic()
        if self._stop is None and now >= self._held_until - self._margin:
            return "LEASE_LOST"
        return self._stop or ("TIMEOUT" if now >= self._ends_at else None)

    def _judged(self, exit_code: int, stopped: str | None) -> Json:
        facts = {"exitCode": exit_code, "output": self._tail}
        if stopped is not None:
            return failed(stopped) | facts
        if exit_code == 0:
            return {"status": "succeeded"} | facts
        by = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
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
        """Send the log, and renew the lease after a third of its time, until the job is over; stop it if refused."""
        renew_at, backoff = time.monotonic() + self._lease / 3, Backoff(longest=self._lease / 10)
        while not self._over.wait(min(LOG_SECONDS, max(0.0, renew_at - time.monotonic()))):
            try:
                if time.monotonic() >= renew_at:
                    self._renew()
                    renew_at, backoff = time.monotonic() + self._lease / 3, Backoff(longest=self._lease / 10)
                self._send_log()
            except Away:
                renew_at = time.monotonic() + backoff.pause()
            except Refused as error:
                self.stop("LEASE_LOST" if error.code == "LEASE_LOST" else "AGENT_STOPPED")
                break

    def _renew(self) -> None:
        sent = time.monotonic()
        answer = self._server.about(self.run_id, "renew", self.fence, {}, self._lease / 3)
        self._held_until = sent + float(answer["leaseSeconds"])
        if answer["cancel"]:
            self.stop("CANCELLED")

    def _send_log(self) -> None:
        """Send whole lines, so that the server finds secrets in them; a long line is cut."""
        text = self._unsent[:CHUNK]
        text = text[: text.rfind("\n") + 1] or (text if len(text) == CHUNK else "")
        if text:
            self._server.about(self.run_id, "logs", self.fence, {"offset": self._sent, "text": text}, self._lease / 3)
            self._sent += len(text)
            with self._lock:
                self._unsent = self._unsent.removeprefix(text)


def failed(code: str, message: str | None = None) -> Json:
    return {"status": "failed", "errorCode": code, "error": message or REASONS[code]}
