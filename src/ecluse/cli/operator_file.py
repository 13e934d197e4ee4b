"""`operator.json` in the data directory: the servers of this host and a key for its operator. `ecluse serve` writes it,
the command line reads it when no other server is named. Mode 0600: the key is an administrator's.

    {"key": "ecl_…", "servers": [{"pid": 4711, "url": "http://127.0.0.1:8080/"}, {"pid": 4712, "url": null}]}

A server without a URL is still starting. Entries of processes that are gone are ignored, and removed by the next start.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ecluse.base.data_dir import default_data_dir

Json = dict[str, Any]
NAME = "operator.json"


def data_dir() -> Path:
    given = os.environ.get("ECLUSE_DATA_DIR")
    return Path(given).expanduser() if given else default_data_dir()


def read(folder: Path) -> Json:
    """Return the content of operator.json, without servers whose process is gone; if there is no file, key None and no
    servers."""
    try:
        found = json.loads((folder / NAME).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {"key": None, "servers": []}
    return {"key": found["key"], "servers": [one for one in found["servers"] if _lives(one["pid"])]}


@contextmanager
def changing(folder: Path) -> Iterator[Json]:
    """Lock operator.json, yield its content, and write it back with the caller's changes; one process at a time."""
    if not folder.exists():
        folder.mkdir(parents=True)
        folder.chmod(0o711 if os.geteuid() == 0 else 0o700)  # as root, PostgreSQL's own user enters it
    with (folder / "operator.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        content = read(folder)
        yield content
        write_private(folder / NAME, content)


def write_private(file: Path, content: Mapping[str, Any]) -> None:
    """Replace the file by this content as JSON, readable by its owner only. Readers see the old or the new file."""
    written = file.with_suffix(".new")
    written.unlink(missing_ok=True)
    handle = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as out:
        json.dump(content, out, indent=2)
    written.replace(file)


def announce(folder: Path) -> None:
    """Add this process to operator.json as a server that is starting."""
    with changing(folder) as content:
        content["servers"] = [*_others(content), {"pid": os.getpid(), "url": None}]


def leave(folder: Path) -> None:
    with changing(folder) as content:
        content["servers"] = _others(content)


def _others(content: Json) -> list[Json]:
    return [one for one in content["servers"] if one["pid"] != os.getpid()]


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True
