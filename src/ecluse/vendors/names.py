"""How errors name the settings of a client that an operator would change: those of the server, of a connection, or of a
schedule."""

from __future__ import annotations

from typing import NamedTuple


class Names(NamedTuple):
    url: str
    key: str
    model: str = ""
