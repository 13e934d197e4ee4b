"""Debug logs: the trace of each run in a file of its own, one JSON object per line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ecluse.base.trace import Record


@dataclass(frozen=True)
class TraceFolder:
    """The folder of the trace files of one workflow, one file per run; `suffix` ends their names."""

    folder: Path
    workflow: str
    suffix: str

    def of_run(self, run_id: int) -> Path:
        """Return the path of the file of a run; it need not exist."""
        return self.folder / f"{self.workflow}-run-{run_id}{self.suffix}"

    def erase(self, run_id: int, naming: str | None = None) -> int:
        """Remove the file of a run, or only its lines that contain the word `naming`; return the number of files
        changed (0 or 1)."""
        file = self.of_run(run_id)
        if not file.exists():
            return 0
        if naming is None:
            file.unlink()
            return 1
        word = re.compile(rf"(?<!\w){re.escape(naming)}(?!\w)")
        lines = file.read_text().splitlines(keepends=True)
        kept = [line for line in lines if not word.search(line)]
        file.write_text("".join(kept))
        return int(len(kept) < len(lines))


class TraceFiles:
    """A trace listener that writes each record of a run to the run's file. It writes synchronously, so that the last
    line before a crash is in the file."""

    def __init__(self, place: TraceFolder, now: Callable[[], datetime]) -> None:
        self._place, self._now = place, now
        place.folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, record: Record) -> None:
        tracer = record.tracer
        if tracer.workflow != self._place.workflow or tracer.run_id is None:
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
        with self._place.of_run(tracer.run_id).open("a") as file:
            file.write(f"{json.dumps(line, default=str)}\n")
