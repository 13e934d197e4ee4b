"""Sizes and time limits of realtime."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The limits of realtime, with their defaults; tests pass shorter ones, servers `sockets` of their knob."""

    # Per tenant and replica; 0: no limit. The app key is public: sockets have a limit of their own, so that they cannot
    # use up that of streams.
    sockets: int = 2_000
    subscriptions: int = 100  # of one socket
    message_bytes: int = 20_000
    client_events: int = 10  # of one socket in a second
    page: int = 500  # events that a stream reads at once to catch up
    # Seconds.
    activity_timeout: int = 120  # of silence after which a peer sends a ping
    pong_within: int = 30
    send_within: float = 30.0  # a client that takes longer to read is cut off
    keep_alive: float = 10.0  # between two checks of a stream's key
    look_every: float = 5.0  # at the subscriptions of other replicas
    shut_every: float = 10.0  # between two checks for disabled tenants, and of the keys of sockets


LIMITS = Limits()
