"""Progress bars of runs and stages, computed from counts, and the table of runs that several pages show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ecluse.db.connect import Connection
from ecluse.db.query import Row
from ecluse.insight import run_queries
from ecluse.insight.redrive_chains import redrives_of, standing
from ecluse.insight.stalls import Stall, stalls
from ecluse.web.own_pages import Own, of_runs

WORK = {"done": "done", "failed": "failed", "ignored": "ignored", "in_flight": "in flight"}
WORK |= {"unfinished": "unfinished"}  # at the end of the run
NOT_FINISHED = ("in flight", "unfinished", "cancelled")


@dataclass(frozen=True)
class Part:
    kind: str
    count: int
    start: float
    width: float


@dataclass(frozen=True)
class Bar:
    """A progress bar: the total, and its parts by kind (done, failed, in flight, …). What the parts leave of the total
    is still waiting."""

    total: int
    parts: Sequence[Part]

    @property
    def finished(self) -> int:
        return sum(part.count for part in self.parts if part.kind not in NOT_FINISHED)

    @property
    def failed(self) -> int:
        return sum(part.count for part in self.parts if part.kind == "failed")

    @property
    def percent(self) -> int:
        return self.finished * 100 // self.total if self.total else 100

    @property
    def said(self) -> str:
        counts = ", ".join(f"{part.count:,} {part.kind}" for part in self.parts)
        return f"{self.finished:,} of {self.total:,} finished" + (f": {counts}" if counts else "")


def bar(total: int, counts: Mapping[str, int]) -> Bar:
    parts, start = [], 0.0
    for kind, count in counts.items():
        if count:
            width = 100 * count / max(total, sum(counts.values()))
            parts.append(Part(kind, count, round(start, 3), round(width, 3)))
            start += width
    return Bar(total, parts)


def of_stage(stage: Mapping[str, Any]) -> Bar:
    return bar(stage["expected"], {kind: stage[name] for name, kind in WORK.items()})


def of_run(run: Mapping[str, Any], stages: Sequence[Row]) -> tuple[str, Bar] | None:
    """Return a label and a bar: the outcomes of the targets if the run has ended, else the progress of its latest open
    stage (of its latest stage if none is open); None before the first stage."""
    if run["ended_at"] is not None:
        counts = {kind: run[kind] for kind in ("successful", "failed", "ignored", "cancelled")}
        return "targets", bar(run["selected"], counts | {"failed": run["failed"] - run["cancelled"]})
    begun = [stage for stage in stages if stage["ended_at"] is None] or stages
    return (begun[-1]["stage"], of_stage(begun[-1])) if begun else None


FOLDED = 10  # redrives shown under their run, at most: the newest


@dataclass(frozen=True)
class Table:
    """Runs with their progress, schedules, stalls and own pages, as a page shows them. If redrives are folded, the
    latest redrives of each run follow it in `runs`, and the last of them has in `more` the number of redrives not
    shown."""

    runs: Sequence[Row]
    progress: Mapping[int, tuple[str, Bar] | None]
    schedules: Mapping[int, Row]
    stalls: Mapping[int, Stall]
    own: Mapping[int, Own]

    @property
    def busy(self) -> bool:
        return any(run["ended_at"] is None for run in self.runs)


async def folded(connection: Connection, tenant: str, rows: Sequence[Row]) -> list[Row]:
    """Return the runs, each followed by its latest redrives (FOLDED at most), the oldest of these first. Redrives have
    the key `folded`; if some are not shown, the last one has their number in `more`."""
    under = await redrives_of(connection, [run["id"] for run in rows])
    ids = [redrive for redrives in under.values() for redrive in redrives[-FOLDED:]]
    found = await run_queries.list_runs(connection, tenant=tenant, ids=ids, limit=len(ids), offset=0) if ids else []
    by_id = {run["id"]: {**run, "folded": True} for run in found}
    shown: list[Row] = []
    for run in rows:
        redrives = under.get(run["id"], [])
        # A redrive may have been deleted by retention since its id was read.
        shown += [run, *(by_id[redrive] for redrive in redrives[-FOLDED:] if redrive in by_id)]
        if len(redrives) > FOLDED:
            shown[-1] = {**shown[-1], "more": len(redrives) - FOLDED}
    return shown


async def stands(connection: Connection, rows: Sequence[Row]) -> dict[int, Row]:
    """Return the outcome counts after all redrives, by run id, of those among these runs that were redriven."""
    return await standing(connection, list(await redrives_of(connection, [run["id"] for run in rows])))


async def table(connection: Connection, tenant: str, rows: Sequence[Row]) -> Table:
    """Return the table of these runs: reads the progress, the stalls of open runs, and the schedules."""
    open_ = [run["id"] for run in rows if run["ended_at"] is None]
    stages = await run_queries.stages_of(connection, open_)
    schedules = {run["schedule_id"] for run in rows if run["schedule_id"] is not None}
    return Table(
        rows,
        {run["id"]: of_run(run, stages.get(run["id"], [])) for run in rows},
        await run_queries.schedules_of(connection, tenant, schedules),
        await stalls(connection, tenant, open_),
        await of_runs(connection, tenant, rows),
    )
