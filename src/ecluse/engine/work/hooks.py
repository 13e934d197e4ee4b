"""The hooks of stages in the commit: `save` gets the successful results, `on_end` the end of every execution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ecluse.db.connect import Connection
from ecluse.engine.model.flow import ItemEnd, Saved, Stage
from ecluse.engine.model.item import ClaimKey
from ecluse.engine.work.verdict import ItemResult


class Accepted(NamedTuple):
    """The stored part of a result: the item's number of counted executions; and the error with which it failed, if its
    gate has given up on it meanwhile, so that it is not executed again."""

    executions: int
    code: str | None = None
    error: str | None = None


async def call(connection: Connection, batch: Sequence[ItemResult], accepted: Mapping[ClaimKey, Accepted]) -> None:
    """Call the hooks of each stage once, in the commit's transaction, with the accepted results. For a paid stage, also
    with successful results that are not accepted, because the item's claim was lost: its outcome does not change, but
    the paid result is stored."""
    by_stage: dict[int, tuple[Stage, list[ItemResult]]] = {}
    for one in batch:
        paid_for = one.stage.paid and one.status == "succeeded"
        if one.is_heard and (paid_for or one.claim_key in accepted):
            by_stage.setdefault(id(one.stage), (one.stage, []))[1].append(one)
    # Stages in a fixed order and rows by key: two committers that store the same records must not deadlock.
    for stage, results in sorted(by_stage.values(), key=lambda pair: pair[0].name):
        ordered = sorted(results, key=lambda one: one.item.key)
        saved = [Saved(one.item, one.result, one.kept) for one in ordered if one.status == "succeeded"]
        if stage.save is not None and saved:
            await stage.save(connection, saved)
        if stage.on_end is not None:
            await stage.on_end(connection, [_end(one, accepted.get(one.claim_key)) for one in ordered])


def _end(one: ItemResult, stored: Accepted | None) -> ItemEnd:
    executions = one.item.executions + 1 if stored is None else stored.executions
    if stored is not None and stored.code is not None:
        return ItemEnd(one.item, "failed", executions, error_code=stored.code, error=stored.error)
    answer = (one.result, one.kept, one.error_code, one.error, one.due_at, one.http_status)
    return ItemEnd(one.item, one.status, executions, *answer)
