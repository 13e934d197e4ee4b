"""Requests that arrive together are begun a few per pass of the loop, each client in turn."""

from __future__ import annotations

import asyncio

import pytest

from ecluse.access.edge import Edge, EdgeLimits
from ecluse.access.turns import AT_ONCE, Turns


async def passes(turns: Turns, begun: list[str], count: int) -> list[list[str]]:
    """What is begun in each of the next passes of the loop."""
    found = []
    for _ in range(count):
        before = len(begun)
        await asyncio.sleep(0)
        found.append(begun[before:])
    return found


async def test_few_requests_begin_at_once():
    turns, begun = Turns(), []
    for n in range(AT_ONCE):
        turns.put("a", lambda n=n: begun.append(str(n)))
    assert len(begun) == AT_ONCE


async def test_a_client_with_one_request_does_not_wait_for_a_thousand_of_another():
    turns, begun = Turns(), []
    for n in range(1_000):
        turns.put("many", lambda n=n: begun.append(f"many {n}"))
    turns.put("one", lambda: begun.append("one"))
    assert begun == [f"many {n}" for n in range(AT_ONCE)]
    first, second, *others = await passes(turns, begun, 1_000 // AT_ONCE + 10)
    assert len(first) == len(second) == AT_ONCE
    assert "one" in first
    assert [name for name in begun if name != "one"] == [f"many {n}" for n in range(1_000)]  # in the order of arrival
    assert max(map(len, others)) <= AT_ONCE
    turns.put("many", lambda: begun.append("late"))  # nothing waits any more
    assert begun[-1] == "late"


async def test_a_request_that_fails_to_begin_stops_no_other():
    turns, begun, failed = Turns(), [], []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context["exception"]))
    for _ in range(AT_ONCE):
        turns.put("a", lambda: None)
    turns.put("a", lambda: begun[0])
    turns.put("b", lambda: begun.append("next"))
    await passes(turns, begun, 3)
    assert begun == ["next"]
    assert [type(one) for one in failed] == [IndexError]


@pytest.mark.parametrize(
    ("address", "forwarded", "client"),
    [
        ("192.0.2.1", b"198.51.100.7", "192.0.2.1"),  # no proxy: what it names is not believed
        ("127.0.0.1", b"203.0.113.9, 198.51.100.7", "198.51.100.7"),
        ("127.0.0.1", None, "127.0.0.1"),
    ],
)
def test_behind_a_proxy_the_clients_that_it_names_take_turns(address, forwarded, client):
    headers = [] if forwarded is None else [(b"x-forwarded-for", forwarded)]
    edge = Edge(EdgeLimits(connections=10, per_address=5, seconds=1, proxies="127.0.0.1"))
    assert edge.client_of((address, 1), headers) == client
