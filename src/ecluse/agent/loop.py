"""The agent's loops: claim jobs, run each in a thread, report results, stop. Results are on disk before they are
reported, so that neither a restart of the agent nor one of the server loses one."""

import sys
import threading
import time
import uuid

from ecluse.agent.attempt import CHUNK, Attempt, failed
from ecluse.agent.processes import kill_leftovers
from ecluse.agent.server import CALL_SECONDS, Away, Backoff, Json, Refused, Server
from ecluse.agent.settings import Settings
from ecluse.agent.store import Store

WAIT_SECONDS = 25  # of a long poll; proxies often close a silent connection after 30
ROTATE_SECONDS = 30 * 86_400
REPORT_PAUSE = 5.0  # at most, between reports to a server that is away


def say(text: str) -> None:
    print(f"agent: {text}", file=sys.stderr, flush=True)


class Agent:
    def __init__(self, server: Server, store: Store, settings: Settings, version: str) -> None:
        self._server, self._store, self._settings, self._version = server, store, settings, version
        self._attempts: dict[str, Attempt] = {}
        self._changed = threading.Condition()
        self.stopping, self._idle, self._to_report = threading.Event(), threading.Event(), threading.Event()
        self.locked_out: str | None = None  # why the server refuses everything

    def run(self) -> None:
        """Claim and run jobs until `stopping` is set; return when all have ended and are reported or kept on disk."""
        for run_id, attempt in self._store.left_running():
            say(f"attempt {run_id} was running when the agent ended; {kill_leftovers(run_id)} processes killed")
            lost = {"fence": attempt["fence"], "result": failed("AGENT_RESTARTED"), "offset": 0, "log": ""}
            self._store.ended(run_id, lost)
        self._to_report.set()  # what is left of an earlier start
        reporting, claiming = threading.Thread(target=self._report_all), threading.Thread(target=self._claim_all)
        reporting.start()
        claiming.start()
        self.stopping.wait()
        say(f"stopping; jobs that are running: {len(self._attempts)}")
        while claiming.is_alive():
            self._server.interrupt()
            claiming.join(0.1)
        self._end_attempts()
        self._idle.set()
        self._to_report.set()
        reporting.join()

    def _lock_out(self, error: Refused) -> None:
        with self._changed:
            self.locked_out = str(error)
            self._changed.notify_all()
        self.stopping.set()

    def _end_attempts(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._attempts or self.locked_out, self._settings.stop_seconds)
            for one in self._attempts.values():
                one.stop("AGENT_STOPPED")
            self._changed.wait_for(lambda: not self._attempts)

    def _claim_all(self) -> None:
        backoff, key = Backoff(), uuid.uuid4()
        while not self.stopping.is_set():
            try:
                self._rotate()
                with self._changed:
                    self._changed.wait_for(lambda: len(self._attempts) < self._settings.slots, 1.0)
                    free = self._settings.slots - len(self._attempts)
                if free:
                    self._claim(key, free, WAIT_SECONDS)
                    key, backoff = uuid.uuid4(), Backoff()
            except Away as error:  # the same key again: an answer that was lost is repeated
                if not self.stopping.is_set():
                    say(f"claim: {error}; trying again")
                    self.stopping.wait(backoff.pause())
            except Refused as error:
                return self._lock_out(error)
        try:
            self._claim(key, 0, 0)  # the jobs of a claim that the stop has interrupted; no new ones
        except (Away, Refused) as error:
            say(f"last claim: {error}")
        return None

    def _claim(self, key: uuid.UUID, most: int, wait: int) -> None:
        body = {"max": most, "waitSeconds": wait, "types": [], "version": self._version, "claimKey": str(key)}
        sent = time.monotonic()
        answer = self._server.call("/api/agent/jobs/claim", body, wait + CALL_SECONDS, polls=True)
        begun = sent + float(answer["waitedSeconds"])  # no lease began before the server had waited this long
        for claimed in answer["jobs"]:
            held_until = begun + float(claimed["leaseSeconds"])
            attempt = Attempt(self._server, self._settings.types, claimed, held_until)
            self._store.begun(attempt.run_id, attempt.fence)
            with self._changed:
                self._attempts[attempt.run_id] = attempt
            threading.Thread(target=self._run, args=(attempt,)).start()

    def _run(self, attempt: Attempt) -> None:
        self._store.ended(attempt.run_id, attempt.run())
        self._to_report.set()
        with self._changed:
            del self._attempts[attempt.run_id]
            self._changed.notify_all()

    def _rotate(self) -> None:
        """Replace the credential after ROTATE_SECONDS. The old one is valid until the new one is used."""
        kept = self._store.credential()
        if kept is not None and time.time() - kept["since"] > ROTATE_SECONDS:
            new = self._server.call("/api/agent/rotate", {})["credential"]
            self._store.keep_credential({**kept, "credential": new, "since": time.time()})
            self._server.credential = new

    def _report_all(self) -> None:
        backoff = Backoff(longest=REPORT_PAUSE)
        while not (self._idle.is_set() and not self._to_report.is_set()):
            self._to_report.wait()
            self._to_report.clear()
            try:
                for run_id, kept in self._store.results():
                    self._report(run_id, kept)
                backoff = Backoff(longest=REPORT_PAUSE)
            except Away as error:
                say(f"report: {error}; the result is kept")
                if not self._idle.wait(backoff.pause()):
                    self._to_report.set()
            except Refused as error:
                return self._lock_out(error)
        return None

    def _report(self, run_id: str, kept: Json) -> None:
        """Report a kept result with its log; delete it once the server has stored it or refused it for good."""
        for start in range(0, len(kept["log"]), CHUNK):
            piece = {"offset": kept["offset"] + start, "text": kept["log"][start : start + CHUNK]}
            self._send(run_id, "logs", kept, piece)
        self._send(run_id, "result", kept, kept["result"])
        self._store.reported(run_id)

    def _send(self, run_id: str, what: str, kept: Json, body: Json) -> None:
        try:
            self._server.about(run_id, what, kept["fence"], body)
        except Refused as error:  # a log that is refused must not hold back its result
            if error.locks_out:
                raise
            say(f"{what} of {run_id}: {error}")
