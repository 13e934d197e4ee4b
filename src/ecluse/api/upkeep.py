"""Routes for the upkeep of an installation, for admins of the tenant `default`: retention, growth, and the doctor's
findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Literal

from pydantic import Field

from ecluse.access import maintenance
from ecluse.access.commands import Command
from ecluse.access.secrets import Secrets
from ecluse.access.surface import Act, Look, Surface
from ecluse.access.wire import Body, Shape
from ecluse.api.keys import administrators_only
from ecluse.base.trace_files import TraceFolder
from ecluse.db.query import Row, fetch_value
from ecluse.doctor.database import check_database
from ecluse.doctor.findings import Finding
from ecluse.retention import growth, sweep
from ecluse.retention.sweep import Pruned, Rule

surface = Surface("upkeep")

SCHEDULERS = "SELECT count(*)::int FROM replicas WHERE state = 'live' AND 'scheduler' = ANY(roles)"


@dataclass(frozen=True)
class Upkeep:
    """Settings and checks from the composition root, as `app.state.upkeep`."""

    rules: Sequence[Rule]
    keep: Mapping[str, int]  # knobs of retention, in days
    folders: Mapping[str, TraceFolder]
    db_pool: int
    check: Callable[[], list[Finding]]  # settings and disk
    has_price: Callable[[str, str], bool]  # of a vendor's model


class PrunedKind(Shape):
    kind: str = Field(examples=["runs"])
    knob: str | None = Field(description="The setting; null: the time is fixed.", examples=["ECLUSE_KEEP_RUNS_DAYS"])
    days: int | None = Field(description="null: kept for ever.")
    rows: int = Field(description="Number of rows that would be deleted now.")
    tables: dict[str, int]
    oldest: datetime | None
    newest: datetime | None
    kept: dict[str, int] = Field(description="Old families of runs that stay, by reason.")


class GrowingKind(Shape):
    name: str
    keep: int = Field(description="Days for which rows are kept; 0: for ever.")
    bytes: int
    per_day: float = Field(description="Growth in bytes.")


class Retention(Shape):
    bytes: int = Field(description="Size of the database.")
    summary: str = Field(description="Size, growth and expected final size, in one sentence.")
    kinds: list[PrunedKind]
    growing: list[GrowingKind] = Field(description="Growth by kind; empty until there is a day of runs.")


class AskedPrune(Shape):
    asked: Literal[True]
    schedulers: int = Field(description="Live schedulers; without one, nothing is deleted until one starts.")


class Prune(Body):
    reason: str | None = Field(None, min_length=1, max_length=2000, examples=["the disk is full"])


class FindingRow(Shape):
    level: Literal["ok", "warn", "fail"]
    what: str = Field(examples=["lanes"])
    says: str
    do: str = Field(description="Advice; empty if all is well.")


class Findings(Shape):
    findings: list[FindingRow]


def _upkeep(look: Look) -> Upkeep:
    administrators_only(look)
    upkeep: Upkeep = look.state.upkeep
    return upkeep


@surface.read(
    "/api/retention", needs="retention.read", answer=Retention, command=Command("retention show", columns=("kinds",))
)
async def show_retention(look: Look) -> Row:
    """Show the size of the database, its growth, and the rows that retention would delete now. Nothing is deleted."""
    upkeep = _upkeep(look)
    database, days, groups = await growth.measure(look.connection, upkeep.keep)
    foreseen = await sweep.foresee(look.connection, look.kit.by_name, upkeep.rules)
    return {
        "bytes": database.bytes,
        "summary": growth.sentence(database, days, groups),
        "kinds": [_kind(one) for one in foreseen],
        "growing": [one._asdict() for one in groups],
    }


def _kind(one: Pruned) -> Row:
    return {
        "kind": one.rule.kind.name,
        "knob": one.rule.knob,
        "days": None if one.rule.keep is None else one.rule.keep.days,
        "rows": one.rows.total(),
        "tables": {table: rows for table, rows in one.rows.items() if rows},
        "oldest": one.oldest,
        "newest": one.newest,
        "kept": dict(one.kept),
    }


@surface.operation(
    "POST",
    "/api/retention/prune",
    needs="retention.write",
    answer=AskedPrune,
    status=202,
    action="retention.prune",
    subject="retention",
    command=Command("retention prune", preview="show_retention"),
)
async def prune_now(act: Act, body: Prune) -> Row:  # noqa: ARG001 - its reason is recorded
    """Ask a scheduler to delete the rows that are older than the settings keep them, now instead of within five
    minutes."""
    administrators_only(act)
    if not await maintenance.ask(act.connection, "prune", "", act.caller.actor):
        act.changes_nothing()
    return {"asked": True, "schedulers": await fetch_value(act.connection, SCHEDULERS)}


@surface.read("/api/doctor", needs="doctor.read", answer=Findings, command=Command("doctor"))
async def check_installation(look: Look) -> Row:
    """Check settings, disk and database of this server, with advice per problem. Nothing is changed."""
    upkeep = _upkeep(look)
    secrets: Secrets | None = look.state.secrets
    known = (upkeep.db_pool, upkeep.keep, secrets.key_ids if secrets else (), upkeep.has_price)
    found = [*upkeep.check(), *await check_database(look.kit.dsn, *known)]
    for package in look.state.packages:
        found += await package.doctor(look.connection) if package.doctor is not None else ()
    return {"findings": [asdict(one) for one in found]}
