"""Alerts of pricing, as a table: when each is raised and cleared, and what to do. An alert is a row, open until it is
cleared, with an event for each of the two, which the notifications deliver. The same table makes the rules for
Prometheus (tools/prometheus_rules.py)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, NamedTuple

from ecluse.db.connect import Connection
from ecluse.db.query import Row, as_json, fetch_all, fetch_rows, fetch_value
from ecluse.engine import Event, slow_lane, write_events
from ecluse.flows.pricing import metrics
from ecluse.flows.pricing.metrics import BURST, Figures

Condition = Callable[["State", datetime], bool]


class State(NamedTuple):
    """What conditions are about: the figures of a project, and whether the breaker of its lane is open."""

    figures: Figures
    breaker_open: bool = False

    @property
    def rate(self) -> float | None:
        """The lower one of the success rates of the last day and of the last run."""
        rates = (self.figures.success_rate, self.figures.last_run_rate)
        return min((one for one in rates if one is not None), default=None)


@dataclass(frozen=True)
class Alert:
    """`family`: of the alerts of one family only the most severe one is open. `expr` is the condition for
    Prometheus."""

    name: str
    severity: Literal["warning", "critical"]
    family: str
    raised: Condition
    cleared: Condition
    summary: Callable[[State], str]
    action: str
    expr: str


def _rate(name: str, severity: Literal["warning", "critical"], percent: int, action: str) -> Alert:
    def cleared(state: State, _: datetime) -> bool:
        # Without a value, the runs that raised it are a day old, or one of them is being retried.
        return not state.figures.applying if state.rate is None else state.rate >= percent

    return Alert(
        name,
        severity,
        "success rate",
        raised=lambda state, _: state.rate is not None and state.rate < percent,
        cleared=cleared,
        summary=lambda state: f"success rate {state.rate:.1f} %, less than {percent} %",
        action=action,
        expr=f"min by (tenant, project) (ecluse_rules_apply_success_rate) < {percent}",
    )


def _dead_letters(name: str, severity: Literal["warning", "critical"], most: int, action: str) -> Alert:
    return Alert(
        name,
        severity,
        "dead letters",
        raised=lambda state, _: state.figures.dead > most,
        cleared=lambda state, _: state.figures.dead <= most,
        summary=lambda state: f"{state.figures.dead} dead letters, more than {most}",
        action=action,
        expr=f'max by (tenant, project) (ecluse_rules_dlq_size{{sent="true"}}) > {most}',
    )


MOST_REFUSALS = 3
DEAD_LETTERS = "Read the causes (`ecluse pricing dead-letters report`), then retry the failed targets of the runs."
FAILURES = "Read the causes of the last runs; queue no further run of the project before they are known."
BURST_429 = Alert(
    "429 Burst",
    "warning",
    "429",
    raised=lambda state, _: state.figures.refusals > MOST_REFUSALS,
    cleared=lambda state, now: state.figures.refused_at is None or state.figures.refused_at <= now - BURST,
    summary=lambda state: f"{state.figures.refusals} calls refused with 429 in 5 minutes, more than {MOST_REFUSALS}",
    action="Nothing: the lane of the project runs at half its rate until 5 minutes have passed without a 429. If it "
    "comes back, set a lower rate, or find what else calls the shop with this token.",
    expr=f"max by (tenant, project) (increase(ecluse_rules_429_count_total[5m])) > {MOST_REFUSALS}",
)
# The most severe one of a family comes first.
ALERTS = (
    _rate("Critical Success Rate", "critical", 90, FAILURES),
    _rate("Low Success Rate", "warning", 97, FAILURES),
    _dead_letters("DLQ Critical", "critical", 100, DEAD_LETTERS),
    _dead_letters("DLQ Backlog", "warning", 50, DEAD_LETTERS),
    BURST_429,
    Alert(
        "Circuit breaker triggered",
        "warning",
        "breaker",
        raised=lambda state, _: state.breaker_open,
        cleared=lambda state, _: not state.breaker_open,
        summary=lambda _: "Circuit breaker triggered: the shop refused call after call with 429",
        action="Nothing, if it clears: the shop is called again after a minute, one call first.",
        expr='max by (lane) (ecluse_lane_down{lane=~"shop/.+"}) == 1',
    ),
)

LOCK = "SELECT pg_try_advisory_xact_lock(hashtextextended('ecluse pricing alerts', 60))"
OPEN = "SELECT project_id, alert FROM pricing_alerts WHERE cleared_at IS NULL"
LANES = """
SELECT name, trips > 0 AS is_down, per_second IS NOT NULL AS has_rate, slowed_until FROM lanes WHERE name = ANY(%s)
"""
RAISE = """
INSERT INTO pricing_alerts (tenant_id, project_id, alert, severity, summary, action, raised_at)
SELECT t.tenant, t.project, t.alert, t.severity, t.summary, t.action, ecluse_now()
FROM jsonb_to_recordset(%s::jsonb)
    AS t(tenant text, project bigint, alert text, severity text, summary text, action text)
ON CONFLICT (project_id, alert) WHERE cleared_at IS NULL DO NOTHING RETURNING *
"""
CLEAR = """
UPDATE pricing_alerts a SET cleared_at = ecluse_now() WHERE a.cleared_at IS NULL
  AND ((a.project_id, a.alert) IN (SELECT t.project, t.alert
                                   FROM jsonb_to_recordset(%s::jsonb) AS t(project bigint, alert text))
       OR a.project_id IN (SELECT p.id FROM pricing_projects p WHERE p.deleted_at IS NOT NULL))
RETURNING a.*
"""


class Decision(NamedTuple):
    """The names of the alerts of a project that are open from now on, and what changes."""

    open: frozenset[str]
    raised: Sequence[Alert]
    cleared: Sequence[str]


class ProjectLane(NamedTuple):
    """The lane of a project."""

    name: str
    is_down: bool
    has_rate: bool
    slowed_until: datetime | None


def decide(state: State, now: datetime, before: Iterable[str]) -> Decision:
    """Decide on the alerts of a project; those named in `before` are open. An open alert lasts until its own condition
    clears it, or a more severe one of its family takes its place."""
    before, after = frozenset(before), dict[str, Alert]()
    for one in ALERTS:
        if one.raised(state, now) or (one.name in before and not one.cleared(state, now)):
            after.setdefault(one.family, one)
    lasting = frozenset(one.name for one in after.values())
    return Decision(lasting, [one for one in after.values() if one.name not in before], sorted(before - lasting))


async def watch(connection: Connection, lane_name: Callable[[str, int], str]) -> None:
    """Raise and clear alerts, with their events, and slow the lanes of projects with a burst of 429s. Called at
    intervals by every replica; one at a time does it."""
    async with connection.transaction():
        if not await fetch_value(connection, LOCK):
            return
        await metrics.keep(connection)
        figures = await metrics.read(connection)
        names = [lane_name(one.tenant, one.project) for one in figures]
        lanes = {lane.name: lane for lane in await fetch_all(connection, ProjectLane, LANES, (names,))}
        before = defaultdict[int, set[str]](set)
        for project, alert in await fetch_rows(connection, OPEN):
            before[project].add(alert)
        raised, cleared = list[Row](), list[Row]()
        for one, name in zip(figures, names, strict=True):
            lane = lanes.get(name)
            state = State(one, breaker_open=lane is not None and lane.is_down)
            decision = decide(state, one.now, before[one.project])
            raised += [_row(state, alert) for alert in decision.raised]
            cleared += [{"project": one.project, "alert": alert} for alert in decision.cleared]
            if lane is not None and BURST_429.name in decision.open:
                await _slow(connection, lane, one)
        over = await fetch_all(connection, dict, CLEAR, (as_json(cleared),))
        new = await fetch_all(connection, dict, RAISE, (as_json(raised),))
        await write_events(
            connection, [_event(row, "cleared") for row in over] + [_event(row, "raised") for row in new]
        )


async def _slow(connection: Connection, lane: ProjectLane, figures: Figures) -> None:
    """Halve the pace of a lane until BURST after the last 429."""
    until = figures.now if figures.refused_at is None else figures.refused_at + BURST
    if lane.has_rate and until > figures.now and (lane.slowed_until is None or lane.slowed_until < until):
        await slow_lane(connection, lane.name, reason=BURST_429.name, quiet=until - figures.now)


def _row(state: State, alert: Alert) -> Row:
    about = {"tenant": state.figures.tenant, "project": state.figures.project}
    told = {"summary": f"{state.figures.name}: {alert.summary(state)}", "action": alert.action}
    return {**about, "alert": alert.name, "severity": alert.severity, **told}


def _event(row: Mapping[str, Any], what: str) -> Event:
    """Return the event of an alert. Its type names the severity, so that endpoints can subscribe to one of them."""
    key = f"pricing-alert-{row['id']}-{row['raised_at']:%Y%m%dT%H%M%SZ}"
    payload = {
        "alert_id": str(row["id"]),
        "project_id": str(row["project_id"]),
        "dedup_key": key,
        **{name: row[name] for name in ("alert", "severity", "summary", "action")},
        "raised_at": row["raised_at"].isoformat(),
    }
    name, about = f"pricing.alert.{row['severity']}.{what}", f"pricing_project:{row['project_id']}"
    return Event(row["tenant_id"], f"{key}:{what}", name, about, payload, correlation_id=key)
