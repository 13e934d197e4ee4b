"""The knobs of the edge: what clients, and proxies in front of the server, may do before a request is read."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic_settings import BaseSettings

from ecluse.settings.flows import at_least


class EdgeKnobs(BaseSettings):
    """The knobs of the edge."""

    ECLUSE_REQUEST_DEADLINE_SECONDS: Annotated[float, at_least(0.1)] = Field(
        10.0,
        description="Time that a client has to send the request line and headers, and again to send the body. A "
        "client that takes nothing of its answer for six times as long is disconnected. Streams and sockets that are "
        "read are not affected. Minimum 0.1.",
    )
    ECLUSE_MAX_CONNECTIONS: Annotated[int, at_least(1)] = Field(
        10_000,
        description="Maximum open connections of clients, per process; fewer if the process may not open that many "
        "files (`ecluse doctor` shows the number in force). At the limit a new connection takes the place of the one "
        "that has waited longest without a complete request, and is refused if there is none. Minimum 1.",
    )
    ECLUSE_MAX_CONNECTIONS_PER_ADDRESS: Annotated[int, at_least(1)] | None = Field(
        None,
        description="Maximum open connections of one client address, per process; the addresses in "
        "`FORWARDED_ALLOW_IPS` are exempt. At the limit, a new connection takes the place of the one of this address "
        "that has waited longest without a complete request, and is refused if there is none. Unset: half of the "
        "number of connections in force. Minimum 1.",
    )
    FORWARDED_ALLOW_IPS: str = Field(
        "127.0.0.1",
        description="Addresses and networks of reverse proxies, separated by commas: their `X-Forwarded-For` and "
        "`X-Forwarded-Proto` are believed. `*`: those of every client; only if no client can reach the port directly.",
    )
