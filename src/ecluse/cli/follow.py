"""Follow a run until it ends, for `--wait` and `ecluse runs watch`. Progress goes to stderr: at a terminal one line is
rewritten, elsewhere each change is a line of its own. While the server cannot be reached, the command retries for
GONE_SECONDS."""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from ecluse.cli.client import Client
from ecluse.cli.failure import BAD, OK, STILL_OPEN, UNREACHABLE, Failure
from ecluse.cli.show import harmless, say, write, write_json

EVERY_SECONDS = 0.5
PACE_SECONDS = 10.0  # window over which the rate is measured
STUCK_SECONDS = 10.0  # without a change: ask what the run waits for
GONE_SECONDS = 60.0  # without a server
BAR = 20
GOOD = ("succeeded", "skipped")


@dataclass
class Pace:
    """Measures the rate of a stage, in finished items per second, over the last PACE_SECONDS."""

    seen: deque[tuple[float, int]] = field(default_factory=deque)

    def per_second(self, now: float, finished: int) -> float:
        self.seen.append((now, finished))
        while len(self.seen) > 2 and now - self.seen[1][0] >= PACE_SECONDS:
            self.seen.popleft()
        since, before = self.seen[0]
        return max(0.0, (finished - before) / (now - since)) if now > since else 0.0


def progress(run: Mapping[str, Any], pace: dict[str, Pace], now: float, *, bar: bool = False) -> str:
    """Return the progress line of an open run: status, and counts, rate and remaining time of each stage. `pace` keeps
    the measurements by stage between calls; `bar`: draw a progress bar."""
    said = [f"run {run['id']} {run['flow']} {run['status']}"]
    if run.get("phase"):
        said.append(harmless(run["phase"]))
    for stage in run.get("stages", ()):
        finished = stage["done"] + stage["failed"] + stage["ignored"]
        if stage["ended_at"] is not None:
            failed = f", {stage['failed']} failed" if stage["failed"] else ""
            said.append(f"{stage['stage']} {stage['end_cause']} {finished}/{stage['expected']}{failed}")
            continue
        rate = pace.setdefault(stage["stage"], Pace()).per_second(now, finished)
        share = f" ({finished * 100 // stage['expected']} %)" if stage["expected"] else ""
        drawn = f"{drawing(finished, stage['expected'])} " if bar else ""
        parts = [f"{stage['stage']} {drawn}{finished}/{stage['expected']}{share}"]
        parts += [f"{stage[name]} {name.replace('_', ' ')}" for name in ("failed", "ignored", "in_flight", "waiting")]
        parts += [f"round {stage['round']}"] if stage["round"] else []
        parts.append(f"{rate:.0f}/s")
        if rate > 0 and (left := stage["in_flight"] + stage["waiting"]):
            parts.append(f"{timedelta(seconds=round(left / rate))} left")
        said.append(", ".join(parts))
    will_fail = run.get("will_fail") or {"count": 0}
    if will_fail["count"]:
        codes = ", ".join(f"{count} {code}" for code, count in will_fail["codes"].items())
        said.append(harmless(f"{will_fail['count']} will fail ({codes})"))
    return " | ".join(said)


def drawing(finished: int, expected: int) -> str:
    full = BAR * finished // expected if expected else 0
    return "█" * full + "░" * (BAR - full)


def ending(run: Mapping[str, Any]) -> str:
    began, ended = (datetime.fromisoformat(run[name]) for name in ("created_at", "ended_at"))
    if run["started_at"]:
        began = datetime.fromisoformat(run["started_at"])
    how = run["status"]
    if run["state"] == "cancelled":
        who = run["ended_by"] or "an operator"
        how = harmless(f"cancelled with run {who[4:]}" if who.startswith("run:") else f"cancelled by {who}")
    why = f" ({harmless(run['reason'])})" if run["reason"] else ""
    reasons = "".join(f"\n  {count:>8}  {code}" for code, count in sorted(run["outcomes"].items()))
    incomplete = run.get("selection_incomplete")
    lacks = f"\n  selection incomplete: {harmless(incomplete)}" if incomplete else ""
    seconds = (ended - began).total_seconds()
    return f"run {run['id']} {run['flow']}: {how} in {seconds:.1f} s{why}: {counts(run)}{reasons}{lacks}"


def counts(run: Mapping[str, Any]) -> str:
    """Return the result counts of a run; cancelled targets are counted apart from failed ones."""
    successful, failed, ignored = (run[name] or 0 for name in ("successful", "failed", "ignored"))
    cancelled = run["cancelled"] or 0
    parts = [f"{successful} successful", f"{failed - cancelled} failed"]
    parts += [f"{cancelled} cancelled"] if cancelled else []
    return f"{run['selected'] or 0} = {' + '.join([*parts, f'{ignored} ignored'])}"


def watch(client: Client, run_id: str, *, timeout: float | None, as_json: bool) -> int:
    """Follow the run until it ends or `timeout` seconds have passed (None: no limit), show the result, and return the
    exit code: OK if it succeeded or had nothing to do, BAD if not, STILL_OPEN after the timeout."""
    line, began = Line(), time.monotonic()
    last, changed = "", began
    pace: dict[str, Pace] = {}
    try:
        while (run := _read(client, run_id, line))["ended_at"] is None:
            now = time.monotonic()
            said = progress(run, pace, now, bar=line.live)
            if said != last:
                line.show(said)
                last, changed = said, now
            if timeout is not None and now - began > timeout:
                return _still_open(run, line, f" after {timeout:g} s and continues", as_json=as_json)
            if now - changed > STUCK_SECONDS:
                changed = now
                line.say(f"run {run_id}: {harmless(client.get(f'/api/runs/{run_id}/waiting')['summary'])}")
            time.sleep(EVERY_SECONDS)
    except KeyboardInterrupt:
        line.say(f"Stopped following run {run_id}, which continues: `ecluse runs watch {run_id}` follows it again.")
        raise
    line.clear()
    if as_json:
        write_json(run)
    else:
        write(ending(run))
    return OK if run["state"] in GOOD else BAD


def _still_open(run: Mapping[str, Any], line: Line, how: str, *, as_json: bool) -> int:
    again = f"`ecluse runs watch {run['id']}` follows it again"
    line.say(f"run {run['id']} is {run['status']}{how}. Stopped following it; {again}.")
    if as_json:
        write_json(run)
    return STILL_OPEN


def _read(client: Client, run_id: str, line: Line) -> dict[str, Any]:
    """Read the run. While the server cannot be reached or fails (5xx), retry for GONE_SECONDS; then, and at once for
    any other error, raise the Failure."""
    until = time.monotonic() + GONE_SECONDS
    told = False
    while True:
        try:
            found: dict[str, Any] = client.get(f"/api/runs/{run_id}")
        except Failure as error:
            if error.code != UNREACHABLE or time.monotonic() > until:
                raise
            if not told:
                line.say(f"retrying: {error.message}")
            told = True
            time.sleep(EVERY_SECONDS)
        else:
            return found


class Line:
    """The progress line on stderr: rewritten in place at a terminal, else one line per change."""

    def __init__(self) -> None:
        self.live = sys.stderr.isatty()

    def show(self, text: str) -> None:
        if not self.live:
            say(text)
            return
        room = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"\r\x1b[K{text if len(text) <= room else text[: room - 1] + '…'}")
        sys.stderr.flush()

    def clear(self) -> None:
        if self.live:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def say(self, text: str) -> None:
        self.clear()
        say(text)
