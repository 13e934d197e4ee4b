"""Trace of one entity (such as a run) as log lines: START, STEP, DONE, FAN-OUT, WAITING, END, with the ids that connect
them. Registered listeners get each record, too: one of them fills `workflow_logs`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import structlog

from ecluse.base.masking import masked, masked_value

log = structlog.get_logger(__name__)

Level = Literal["info", "warning", "error"]
NAMED = ("request_id", "company_siren", "source_api")  # mandatory fields of log lines that only some flows have


def named_in(given: Any) -> dict[str, str]:
    """Return the fields of NAMED that `given` (the input of a run, or the payload of an item) has, as texts; an empty
    dictionary if it is not an object."""
    if not isinstance(given, Mapping):
        return {}
    return {name: str(given[name]) for name in NAMED if given.get(name) is not None}


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a trace, as listeners get it; secrets in message and data are hidden."""

    tracer: Tracer
    level: Level
    message: str
    data: dict[str, Any]
    event_id: str | None


listeners: list[Callable[[Record], None]] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracer:
    """Writer of the trace of one entity as log lines, all with the same ids."""

    area: str  # in the head of the line, in capitals
    workflow: str
    entity: tuple[str, str]  # type and id of the traced entity
    tenant_id: str
    correlation_id: str
    run_id: int | None = None
    trace_id: str | None = None  # None: the correlation id
    function_id: str | None = None
    ids: str = field(default="")
    event_id: str | None = None  # of the event that started it; for lines without an event id of their own
    named: Mapping[str, str] = field(default_factory=dict)  # further fields of every line

    def start(self, what: str, **data: Any) -> None:
        """Log that the work `what` begins."""
        self._write("START:", what, data)

    def step(self, what: str, **data: Any) -> None:
        """Log a step of the work."""
        self._write("STEP:", what, data)

    def done(self, what: str, seconds: float, **data: Any) -> None:
        """Log that a step is done, and how long it took."""
        self._write("DONE:", what, data, seconds=seconds)

    def fan_out(self, event: str, count: int, event_ids: Sequence[str], **data: Any) -> None:
        """Log a fan-out of `count` events, with a sample of their ids by which the dispatch can be traced."""
        facts = {**data, "items": count, "event_ids": list(event_ids)}
        self._write("FAN-OUT:", f"{event} x{count}", facts, event_id=event_ids[0] if event_ids else None)

    def waiting(self, what: str, **data: Any) -> None:
        """Log what the entity waits for."""
        self._write("WAITING:", what, data)

    def end(self, how: str, seconds: float, **data: Any) -> None:
        """Log how the work has ended, and how long it took."""
        self._write("END:", how, data, seconds=seconds)

    def warn(self, what: str, *, event_id: str | None = None, **data: Any) -> None:
        """Log a problem that the work survives. `event_id`: of the event concerned, if it is another than the tracer's
        own."""
        self._write("!! WARN:", what, data, level="warning", event_id=event_id)

    def error(self, what: str, *, event_id: str | None = None, **data: Any) -> None:
        """Log a failure. `event_id` as in `warn`."""
        self._write("!! ERROR:", what, data, level="error", event_id=event_id)

    def _write(
        self,
        verb: str,
        what: str,
        data: dict[str, Any],
        *,
        level: Level = "info",
        event_id: str | None = None,
        seconds: float | None = None,
    ) -> None:
        if seconds is not None:
            data["duration_ms"] = round(seconds * 1000)
        getattr(log, level)(
            what,
            verb=verb,
            area=self.area,
            ids=self.ids or "-".join(self.entity),
            event_type=f"{self.workflow}.{verb.strip('!: ').lower().replace('-', '_')}",
            correlation_id=self.correlation_id,
            tenant_id=self.tenant_id,
            run_id=self.run_id,
            **({"event_id": event_id} if event_id and "event_ids" not in data else {}),
            **{**self.named, **data},
        )
        if listeners:
            data.pop("exc_info", None)
            record = Record(self, level, masked(f"{verb} {what}"), masked_value(data), event_id or self.event_id)
            for listener in listeners:
                listener(record)
