"""An item claimed by a worker, with the claim that fences it."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from ecluse.engine.model.flow import Item

ClaimKey = tuple[int, int]  # item id, claim id


class ClaimedItem(NamedTuple):
    item: Item
    claim_id: int
    fence: int
    start_at: datetime | None
    lane_id: int
    suspicion: int = 0
    solo_deaths: int = 0  # workers that died while it ran alone

    @property
    def claim_key(self) -> ClaimKey:
        return self.item.id, self.claim_id
