"""The default data directory of a host, which holds the embedded PostgreSQL, keys and log files."""

from __future__ import annotations

import os
from pathlib import Path


def default_data_dir() -> Path:
    if os.geteuid() == 0:
        return Path("/var/lib/ecluse")
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "ecluse"
