"""File descriptors of this process. Each connection of a client, of the database and of a vendor needs one; a process
without any left can neither accept nor connect."""

from __future__ import annotations

import resource

MOST = 1_048_576  # where the hard limit is "unlimited", which no kernel grants


def limits() -> tuple[int, int]:
    """Return the soft limit, which is in force, and the hard one, up to which the soft one may be raised."""
    soft, hard = (MOST if one == resource.RLIM_INFINITY else one for one in resource.getrlimit(resource.RLIMIT_NOFILE))
    return soft, hard


def raise_limit() -> None:
    """Raise the soft limit to the hard one: the usual soft limit of 1,024 is for programs that call `select`."""
    soft, hard = limits()
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
