"""The sizes of all pools, and the number of connections of a process by its roles. docs/operations.md has the table."""

from __future__ import annotations

from collections.abc import Collection

SIZE = 10  # of the general pool and of the workflows' pool, unless ECLUSE_DB_POOL is set
CLAIMING = 3  # claims and commits; more of them would only wait for each other
PROMPT = 2  # ticks and taking new runs do not wait for connections that steps, sweeps and gates use
READING = 4  # the API's quick reads, at most
WRITING = 6  # the API's writes, at most: apart from the general pool, which sweeps and gates use
KEYS = 2  # look-ups of API keys: no read of a tenant delays them
WATCHING = 2  # readiness and metrics: a busy engine is ready, and frequent scrapes take nothing from it
DELIVERING = 4  # webhooks and mails, at most


def share(size: int) -> int:
    """Return how many connections of a pool of this size one tenant may use at once: half of them, at least one."""
    return max(1, size // 2)


def most_connections(roles: Collection[str], size: int) -> int:
    """Return how many connections a process with these roles may hold at once; `size` is ECLUSE_DB_POOL."""
    listeners = 2  # for the engine and for realtime
    count = size + listeners + WATCHING
    if "api" in roles:
        count += min(READING, size) + min(WRITING, size) + KEYS
    if "worker" in roles:
        count += CLAIMING + size + min(DELIVERING, size)
        count += 1  # the reaper
    if "worker" in roles or "scheduler" in roles:
        count += 2  # heartbeat and publisher
    count += ("worker" in roles) + ("scheduler" in roles)  # of PROMPT, one each
    return count
