"""Faults in what paid calls have cost."""

from __future__ import annotations

from tests.verify.plants import Fault, Plant, of, sql, then
from tests.verify.world import World

DAY = "UPDATE spend_totals SET {} WHERE scope = 'tenant' AND period = 'day'"


def reserved_for(key: str) -> Plant:
    """The call in flight is that of this item."""

    def plant(world: World) -> None:
        world.sql("UPDATE paid_calls SET item_id = %s WHERE state = 'reserved'", world.items[key])

    return plant


FAULTS = [
    Fault(
        "I-22",
        "a total forged",
        "counts 9 spent and 0.5 reserved, but its calls are 1.25",
        sql(DAY.format("spent = 9")),
    ),
    Fault("I-22", "a reservation lost", "counts 1.25 spent and 0 reserved", sql(DAY.format("reserved = 0"))),
    Fault("I-22", "a paid call lost", "but its calls are 0.25", sql("DELETE FROM paid_calls WHERE state = 'settled'")),
    Fault("I-22", "more than the budget", "of a budget of 1.7", sql("UPDATE budgets SET amount = 1.7")),
    Fault(
        "I-22",
        "money kept for a call that is over",
        "for a call that is over",
        then(reserved_for("chore"), of("chore", "items", "finished_at = finished_at - interval '2 minutes'")),
    ),
]
HARMLESS = {
    "a call that has cost more than was reserved": then(
        sql("UPDATE paid_calls SET reserved = 0.9 WHERE state = 'settled'"), sql("UPDATE budgets SET amount = 1.65")
    ),
    "a budget lowered after the period": sql("UPDATE budgets SET amount = 0.1, updated_at = '2026-03-03'"),
}
