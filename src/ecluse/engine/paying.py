"""Calls that cost money: which of them are under way, and a note of each that may have been paid for in vain."""

from __future__ import annotations

from ecluse.db.connect import Pool
from ecluse.engine.flow import Item

# At most so many notes of a kind: one per crash, however often it is tried afterwards.
NOTE = """
INSERT INTO attempts (run_id, item_id, event_id, round, execution, at, replica_id, error_code, error, ambiguous,
                      maybe_paid)
SELECT %(run)s, %(item)s, %(event_id)s, %(round)s, %(execution)s, ecluse_now(), %(replica)s, %(code)s, %(error)s, true,
       true
WHERE (SELECT count(*) FROM attempts WHERE item_id = %(item)s AND error_code = %(code)s AND maybe_paid) < %(most)s
"""
DIED = "A worker died with it in hand, perhaps while it was being paid for; it is sent again"
STOPPED = "The server was stopped while it was being paid for; it is sent again"
MANY = 1_000


class Paying:
    def __init__(self, pool: Pool, replica: str) -> None:
        self._pool = pool
        self._replica = replica
        self.items: set[int] = set()
        self._cut_off: list[Item] = []

    async def begin(self, item: Item) -> None:
        if item.crashes:
            await self._note(item, "WORKER_CRASHED", DIED, item.crashes)
        self.items.add(item.id)

    def cut_off(self, item: Item) -> None:
        """By a stop of this process, which waits for nobody long."""
        if item.id in self.items:
            self._cut_off.append(item)

    async def note_cut_off(self) -> None:
        for item in self._cut_off:
            await self._note(item, "INTERRUPTED", STOPPED, MANY)

    async def _note(self, item: Item, code: str, error: str, most: int) -> None:
        facts = {"run": item.run_id, "item": item.id, "event_id": item.event_id, "round": item.round, "most": most}
        facts |= {"execution": item.executions, "replica": self._replica, "code": code, "error": error}
        async with self._pool.connection() as connection:
            await connection.execute(NOTE, facts)
