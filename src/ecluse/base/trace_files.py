"""The story of each run in a file of its own, one JSON object per line, for those who look for a bug."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from ecluse.base.trace import Record


class TraceFiles:
    """A listener. Lines are written at once, on the loop: whoever looks for a bug wants the last one, too."""

    def __init__(self, folder: Path, workflow: str, now: Callable[[], datetime], suffix: str = ".log") -> None:
        self._folder, self._workflow, self._now, self._suffix = folder, workflow, now, suffix
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, record: Record) -> None:
        tracer = record.tracer
        if tracer.workflow != self._workflow or tracer.run_id is None:
            return
        line = {
            "at": self._now().isoformat(),
            "level": record.level,
            "area": tracer.area,
            "ids": tracer.ids or "-".join(tracer.entity),
            "message": record.message,
            "tenant_id": tracer.tenant_id,
            "correlation_id": tracer.correlation_id,
            "data": record.data,
        }
        with (self._folder / f"{self._workflow}-run-{tracer.run_id}{self._suffix}").open("a") as file:
            file.write(f"{json.dumps(line, default=str)}\n")
