"""Writes at vendors, which a stage declares instead of plain work: by key (C1), or as a state that can be read back
(C2), of one item or of several in one call. `effects/` has the protocol by which they are sent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

from ecluse.engine.model.context import WorkContext
from ecluse.engine.model.item import Item


class Order(NamedTuple):
    """A write as it is sent to the vendor. `key`: the idempotency key, the same for every send; `wanted`: the value to
    write; `before`: the state that was read from the vendor just before (None for a `KeyedWrite`)."""

    key: str
    wanted: Any
    before: Any


@dataclass(frozen=True, kw_only=True)
class Write:
    """A write at a vendor, instead of plain work: the engine records the write before each send, and finds out whether
    it was applied if the answer is lost. `wanted` returns the value to write for an item, which must be JSON. The write
    is neither sent again nor read back before `quiet` has passed since the last send: at least the call's own deadline,
    plus two seconds, plus the longest time in which the vendor may still apply a request that it has received."""

    wanted: Callable[[Item], Any]
    quiet: timedelta

    async def send_all(self, context: WorkContext, orders: Sequence[tuple[Item, Order]]) -> Mapping[str, Any] | None:
        """Send the writes of these items in one call; return the vendor's answers by item key, or None if the vendor
        accepted all without naming them."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class KeyedWrite(Write):
    """A write of class C1: the vendor deduplicates it by the key, for as long as `remembered`. The answer that `send`
    returns is the item's result."""

    send: Callable[[WorkContext, Item, Order], Awaitable[Any]]
    remembered: timedelta = timedelta(hours=24)

    async def send_all(self, context: WorkContext, orders: Sequence[tuple[Item, Order]]) -> Mapping[str, Any] | None:
        ((item, order),) = orders
        return {item.key: await self.send(context, item, order)}


@dataclass(frozen=True, kw_only=True)
class ReadableWrite(Write):
    """A write that sets a state which can be read back (class C2 of ADR 0007). The write counts as applied if the state
    read back has the wanted fields, in the same spelling ("12.5" is not "12.50"). A state that is neither the wanted
    nor the former one was written by another party, and is not overwritten: the item fails with the code `conflict`.
    The item's result is `wanted`.

    `expected` returns the former state that the write was decided on. If the vendor's state has neither the fields of
    `expected` nor the wanted ones, nothing is sent, and the item fails with the code `conflict`. Without `expected`,
    the state that is read before the first send is the former one, whatever it is."""

    expected: Callable[[Item], Any] | None = None
    conflict: str = "CONFLICT"

    async def read_all(self, context: WorkContext, items: Sequence[Item]) -> Mapping[str, Any]:
        """Read the states of these items at the vendor in one call; return them by item key."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class AbsoluteWrite(ReadableWrite):
    """A `ReadableWrite` of one item per call. `send` may return the state in the vendor's answer, so that a state that
    is not as wanted is noticed at once."""

    send: Callable[[WorkContext, Item, Order], Awaitable[Any]]
    read: Callable[[WorkContext, Item], Awaitable[Any]]

    async def send_all(self, context: WorkContext, orders: Sequence[tuple[Item, Order]]) -> Mapping[str, Any] | None:
        ((item, order),) = orders
        return {item.key: await self.send(context, item, order)}

    async def read_all(self, context: WorkContext, items: Sequence[Item]) -> Mapping[str, Any]:
        (item,) = items
        return {item.key: await self.read(context, item)}


@dataclass(frozen=True, kw_only=True)
class BatchWrite(ReadableWrite):
    """A `ReadableWrite` of several items in one call: items of one `group` (`NewItem`) that wait together are read and
    sent together, at most `most` per call. Each has its own effect, result and retries. Its lane must have a cap per
    key of 1, so that the calls of a group follow each other, and each takes the items that wait.

    `read` returns the states by item key; a missing key is a state of None. `send` returns the answers by item key: the
    state in the vendor's answer or, for an item that the vendor refused alone, a VendorError; the write of a missing
    item is in doubt. `send` returns None if the vendor accepted all. An error that `send` raises is the error of all
    items."""

    most: int
    send: Callable[[WorkContext, Sequence[tuple[Item, Order]]], Awaitable[Mapping[str, Any] | None]]
    read: Callable[[WorkContext, Sequence[Item]], Awaitable[Mapping[str, Any]]]

    async def send_all(self, context: WorkContext, orders: Sequence[tuple[Item, Order]]) -> Mapping[str, Any] | None:
        return await self.send(context, orders)

    async def read_all(self, context: WorkContext, items: Sequence[Item]) -> Mapping[str, Any]:
        return await self.read(context, items)
