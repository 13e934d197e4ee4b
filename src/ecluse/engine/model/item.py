"""Items: units of work, their claims, and the possible results of an execution."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, Literal, NamedTuple

from ecluse.base.ids import item_event_id
from ecluse.base.trace import named_in


class Item(NamedTuple):
    """A unit of work, as its execution gets it (a tuple, because thousands a second are created). `executions`: the
    number of counted executions before this one, in this round; `crashes`: the number of workers that died while they
    held it."""

    id: int
    run_id: int
    tenant_id: str
    flow: str
    stage: str
    key: str
    target: str
    payload: Any
    round: int
    executions: int
    crashes: int
    event_key: str
    correlation_id: str | None = None
    lane_id: int = 0

    @property
    def event_id(self) -> str:
        """The id of the work on this item in this round, used in logs and attempts. It is computed from the item, so
        every replica gets the same id."""
        return item_event_id(self.flow, self.run_id, self.stage, self.key, self.round)

    @property
    def log_fields(self) -> dict[str, Any]:
        """The fields of a log line about this item."""
        return {
            "area": self.flow.upper(),
            "run_id": self.run_id,
            "tenant_id": self.tenant_id,
            "correlation_id": self.correlation_id or self.event_key,
            "stage": self.stage,
            "event_id": self.event_id,
            **named_in(self.payload),
        }


ClaimKey = tuple[int, int]  # item id, claim id


class ClaimedItem(NamedTuple):
    """An item claimed by a worker, with the claim that fences it. `start_at`: the instant of its permit, if its lane
    has a rate; `suspicion`: a `Suspicion`, which says how the item is run (`work/suspects.py`)."""

    item: Item
    claim_id: int
    fence: int
    start_at: datetime | None
    suspicion: int = 0
    solo_deaths: int = 0  # workers that died while it ran alone
    mates: tuple[ClaimedItem, ...] = ()  # claimed with it, to be written in the same call (`BatchWrite`)

    @property
    def batch(self) -> tuple[ClaimedItem, ...]:
        """The items of its call: itself and its mates."""
        return (self, *self.mates)

    @property
    def claim_key(self) -> ClaimKey:
        """The item's id with the claim's id: another claim of the same item has another key."""
        return self.item.id, self.claim_id


@dataclass(frozen=True, slots=True)
class Done:
    """Result of an execution: the item succeeded. `result` is stored with it (jsonb) and passed to the hooks `save` and
    `on_end` of the stage. `kept` is only passed to the hooks, not stored with the item: for large data that the flow
    stores in its own table. `cost`: the cost of a paid call; None: the amount reserved for it (`WorkContext.pay`)."""

    result: Any = None
    kept: Any = None
    cost: Decimal | None = None


@dataclass(frozen=True, slots=True)
class Ignored:
    """Result of an execution: the item can never finish, through no fault of run or vendor (the record is gone
    upstream, say). Its target counts as neither successful nor failed."""

    reason: str
    code: str = "IGNORED"


@dataclass(frozen=True, slots=True)
class Postponed:
    """Result of an execution: the item cannot be done now, through no fault of its own. It is executed again at `until`
    or later, and this execution is not counted. `why` is shown while it waits. `cause`: `lease` if another run or
    process works on the record, `budget` if a budget has no room for its cost, else `postponed`."""

    until: datetime
    why: str
    cause: Literal["lease", "postponed", "budget"] = "postponed"


Result = Done | Ignored | Postponed
