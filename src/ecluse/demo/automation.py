"""Demonstration of the automation flow: a schedule takes a CRM's fiches through details, transcripts and audits, at
vendors that throttle, fail and lose answers; the server is killed half-way. At the end each fiche has one outcome, the
expected one, and the auditor finds no violation."""

from __future__ import annotations

import time
from datetime import UTC, date, datetime, timedelta
from typing import Any

from rich.console import Console

from ecluse.demo import account, overrides
from ecluse.demo.overrides import DEAD_AFTER, HEARTBEAT, QUIET, Override
from ecluse.demo.scene import Scene, post, scene, stay, what_stays, write_json
from ecluse.demo.watching import Kill, Seen, watch

FIRST_DAY = date(2026, 3, 2)
FEWEST_A_DAY = 20  # fewest fiches in a sales list of the sandbox
LONGEST_SECONDS = 300.0
# Mild: every failure heals within the attempts allowed, except for the one recording that cannot be read.
FAULTS: list[dict[str, object]] = [
    {"vendor": "crm", "kind": "latency", "seconds": 0.2},
    {"vendor": "crm", "kind": "latency", "rate": 0.03, "seconds": 1.5},
    {"vendor": "crm", "kind": "throttle", "rate": 0.006, "retry_after": 1, "per_id_times": 1},
    {"vendor": "crm", "kind": "server_error", "rate": 0.04, "status": 502, "per_id_times": 1},
    {"vendor": "elevenlabs", "kind": "refused", "ids": [account.UNREADABLE], "status": 422, "code": "invalid_audio"},
    {"vendor": "elevenlabs", "kind": "latency", "seconds": 0.4},
    {"vendor": "elevenlabs", "kind": "latency", "rate": 0.02, "seconds": 2},
    {"vendor": "elevenlabs", "kind": "throttle", "rate": 0.004, "retry_after": 1, "per_id_times": 1},
    {"vendor": "elevenlabs", "kind": "server_error", "rate": 0.03, "status": 500, "per_id_times": 2},
    {"vendor": "elevenlabs", "kind": "applied_then_reset", "rate": 0.01, "per_id_times": 1},
    {"vendor": "llm", "kind": "latency", "seconds": 0.5},
    {"vendor": "llm", "kind": "latency", "rate": 0.02, "seconds": 1.5},
    {"vendor": "llm", "kind": "throttle", "rate": 0.005, "retry_after": 1, "per_id_times": 1},
    {"vendor": "llm", "kind": "server_error", "rate": 0.02, "status": 500, "per_id_times": 1},
    {"vendor": "llm", "kind": "applied_then_reset", "rate": 0.006, "per_id_times": 1},
]
OVERRIDES = (
    Override("TRANSCRIPTION_ELEVENLABS_RATE_LIMIT_PER_MINUTE", "4500", "the default would take more than an hour"),
    Override("TRANSCRIPTION_RECORDING_WORKER_CONCURRENCY", "60", "the default, 10, is too low for that rate"),
    Override("TRANSCRIPTION_ELEVENLABS_BACKOFF_BASE_SECONDS", "0.5", "shorter backoff"),
    Override("AUTOMATION_FICHE_DETAILS_POLL_INTERVAL_SECONDS", "1", "gates poll more often"),
    Override("AUTOMATION_TRANSCRIPTION_POLL_INTERVAL_SECONDS", "1", "gates poll more often"),
    Override("AUTOMATION_AUDIT_POLL_INTERVAL_SECONDS", "1", "gates poll more often"),
    Override("LLM_CONCURRENCY", "40", "two audits per fiche, more at once"),
    HEARTBEAT,
    DEAD_AFTER,
    QUIET,
)
AUDITS = (
    {
        "name": "Conformité de la vente",
        "description": "Ce que la loi demande d'une vente par téléphone.",
        "steps": [
            {"name": "Enregistrement", "criteria": "Le client est-il informé que l'appel est enregistré ?"},
            {"name": "Rétractation", "criteria": "Le délai de quatorze jours est-il annoncé ?", "weight": 2},
        ],
    },
    {
        "name": "Qualité de l'appel",
        "description": "Comment le conseiller a parlé au client.",
        "steps": [{"name": "Accueil", "criteria": "Le conseiller se présente-t-il clairement ?"}],
    },
)

PROGRESS = """
SELECT r.phase, r.ended_at IS NOT NULL AS ended, w.planned, w.done FROM runs r, LATERAL (
    SELECT count(*) AS planned, count(*) FILTER (WHERE i.status <> 'open') AS done FROM items i
    WHERE i.run_id = r.id AND i.stage = CASE r.phase WHEN 'selection' THEN 'revalidate' WHEN 'fetching' THEN 'fetch'
            WHEN 'auditing' THEN 'audit' END
       OR r.phase = 'transcribing' AND i.run_id IN (SELECT id FROM runs WHERE parent_run_id = r.id)) w
WHERE r.id = %s
"""


def run(*, fiches: int, keep: bool, as_json: bool, given: str | None) -> int:
    """Play the demonstration and return the exit code: 0 if every fiche has its expected outcome and the auditor finds
    no violation. `keep` leaves server and vendors running at the end; `given` is the address of an empty database to
    use."""
    console = Console(stderr=as_json)
    console.print(
        f"[bold]Ecluse[/] audits the calls of {fiches} fiches: details from a CRM, transcripts, two audits each, at "
        "vendors that throttle, fail, are slow and lose answers. The server is killed half-way."
    )
    overrides.show(console, OVERRIDES)
    set_up = time.monotonic()
    with scene(overrides.environment(OVERRIDES), FAULTS, given=given) as played:
        key = played.operator_key()
        schedule = _schedule(played, key, fiches)
        console.print(
            f"set up in {time.monotonic() - set_up:.1f} s: PostgreSQL, the vendors at {played.vendor}, the server at "
            f"{played.url}, a key, two audit configs, schedule {schedule}",
            soft_wrap=True,
        )
        started = time.monotonic()
        run_id = _trigger(played, key, schedule)
        kill = _watch(console, played, run_id)
        report = account.gather(played, key, run_id, kill, time.monotonic() - started)
        account.show(console, report)
        if as_json:
            write_json(report)
        if keep:
            stay(lambda: what_stays(console, played, key, *_again(played, key, schedule)))
    return 0 if account.as_expected(report, fiches) else 1


def _schedule(played: Scene, key: str, fiches: int) -> str:
    """Create the audit configs and a daily schedule that covers enough days for `fiches` sales and is not due during
    the demonstration; return its id."""
    for audit in AUDITS:
        post(f"{played.url}/api/audit-configs", {**audit, "run_automatically": True}, key)
    last_day = FIRST_DAY + timedelta(days=fiches // FEWEST_A_DAY)
    body = {
        "name": "Ventes de mars",
        "schedule_type": "DAILY",
        "time_of_day": f"{datetime.now(UTC) + timedelta(hours=12):%H:%M}",
        "timezone": "UTC",
        "fiche_selection": {
            "mode": "date_range",
            "date_range": "custom",
            "start_date": FIRST_DAY.isoformat(),
            "end_date": last_day.isoformat(),
            "only_with_recordings": True,
            "max_fiches": fiches,
            "max_recordings_per_fiche": account.MOST_RECORDINGS,
        },
    }
    answer: dict[str, Any] = post(f"{played.url}/api/automation/schedules", body, key)
    return str(answer["id"])


def _trigger(played: Scene, key: str, schedule: str) -> int:
    """Start a run of the schedule and return its id."""
    answer: dict[str, Any] = post(f"{played.url}/api/automation/trigger", {"scheduleId": schedule}, key)
    return int(answer["run_id"])


def _watch(console: Console, played: Scene, run_id: int) -> Kill:
    """Show the run's progress until it ends, kill and restart the server half-way, and return the kill."""

    def look() -> Seen:
        (row,) = played.query(PROGRESS, run_id)
        return Seen(
            row["phase"] or ("ended" if row["ended"] else "selection"),
            row["done"],
            row["planned"] or None,
            ended=row["ended"],
        )

    def half_way(seen: Seen) -> bool:
        return seen.phase == "auditing" or (seen.phase == "transcribing" and 0 < 2 * seen.done >= (seen.total or 0))

    return watch(console, played, look, kill_when=half_way, longest=LONGEST_SECONDS)


def _again(played: Scene, key: str, schedule: str) -> tuple[str, str]:
    """Return the lines that say how to start another run."""
    trigger = f"curl -s {played.url}/api/automation/trigger -H 'Authorization: Bearer {key}'"
    return (
        "start another run (stored transcripts are not paid for again):",
        f"  {trigger} -H 'Content-Type: application/json' -d '{{\"scheduleId\": \"{schedule}\"}}'",
    )
