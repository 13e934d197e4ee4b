"""Names of the settings of a client, by which errors say what an operator has to change: settings of the server, of a
connection, or of a schedule."""

from __future__ import annotations

from typing import NamedTuple


class Names(NamedTuple):
    url: str
    key: str
    model: str = ""
