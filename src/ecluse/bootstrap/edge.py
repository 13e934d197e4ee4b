"""The number of client connections that a process accepts, from its settings and its limit of file descriptors."""

from __future__ import annotations

from collections.abc import Collection

from ecluse.access.edge import EdgeLimits
from ecluse.base import descriptors
from ecluse.db.pools import most_connections
from ecluse.doctor.findings import Finding
from ecluse.settings import Settings

SPARE = 100  # the event loop, log files, listeners, connections to vendors that are kept open
FEW = 500  # connections of clients: fewer are worth a warning


def kept(given: Settings, roles: Collection[str], soft: int) -> int:
    """Return how many of `soft` descriptors are reserved for database, vendors and the process itself: as many as these
    may use, but at most half."""
    return min(most_connections(roles, given.ECLUSE_DB_POOL) + given.ECLUSE_HANDS + SPARE, soft // 2)


def edge_limits(given: Settings, roles: Collection[str]) -> EdgeLimits:
    soft, _ = descriptors.limits()
    connections = min(given.ECLUSE_MAX_CONNECTIONS, soft - kept(given, roles, soft))
    per_address = given.ECLUSE_MAX_CONNECTIONS_PER_ADDRESS or max(1, connections // 2)
    return EdgeLimits(connections, per_address, given.ECLUSE_REQUEST_DEADLINE_SECONDS, given.FORWARDED_ALLOW_IPS)


def check_descriptors(given: Settings, roles: Collection[str]) -> Finding:
    (soft, hard), limits = descriptors.limits(), edge_limits(given, roles)
    says = (
        f"soft limit {soft}, hard limit {hard}: at most {limits.connections} connections of clients,"
        f" {limits.per_address} of one address; {kept(given, roles, soft)} kept for database and vendors"
    )
    if limits.connections >= min(FEW, given.ECLUSE_MAX_CONNECTIONS):
        return Finding("ok", "descriptors", says)
    return Finding("warn", "descriptors", says, "raise the limit: `LimitNOFILE=` of the service, or `ulimit -n`")
