"""An absolute write is compared with what is read back: both sides must spell a state alike."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from ecluse.engine import AbsoluteWrite, Item, Order, WorkContext
from tests.support.engine_flows import flow, run_to_end, stage


async def current(_: WorkContext, __: Item) -> Any:
    return {"price": "1.00"}


async def send(_: WorkContext, __: Item, order: Order) -> Any:
    return {"price": f"{order.wanted['price']}0"}


async def test_a_vendor_that_makes_something_else_of_it_is_found_at_once(start_kit, one):
    """Else it would be taken for somebody else's change, as soon as an answer gets lost."""
    write = AbsoluteWrite(wanted=lambda _: {"price": "12.5"}, read=current, send=send, quiet=timedelta(seconds=1))
    kit = await start_kit(f := flow(stage(work=write)))
    await run_to_end(kit, f, ["a"])
    assert one("SELECT outcome, error_code, effect_may_exist FROM outcomes") == ("failed", "NOT_AS_WANTED", True)
    assert "12.50" in one("SELECT reason FROM outcomes")
