"""The agent's state on disk: its credential, the attempts that it is running, and results that the server has not
confirmed. A file appears complete or not at all, and is on the disk before the agent relies on it."""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

Json = dict[str, Any]


class Store:
    def __init__(self, folder: Path) -> None:
        self._credential, self._running, self._results = folder / "credential", folder / "running", folder / "results"
        for one in (self._running, self._results):
            one.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = (folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"Another agent uses {folder}. Give each a --state directory of its own.") from error

    def credential(self) -> Json | None:
        """Return `server`, `credential`, its start `since` and the `mark` of its token; None if not enrolled."""
        return json.loads(self._credential.read_bytes()) if self._credential.exists() else None

    def keep_credential(self, value: Json) -> None:
        _write(self._credential, value)

    def begun(self, run_id: str, fence: int) -> None:
        _write(self._running / run_id, {"fence": fence})

    def ended(self, run_id: str, result: Json) -> None:
        """Keep the result of an attempt until it is `reported`, and forget that the attempt is running."""
        _write(self._results / run_id, result)
        (self._running / run_id).unlink(missing_ok=True)

    def reported(self, run_id: str) -> None:
        (self._results / run_id).unlink()

    def left_running(self) -> list[tuple[str, Json]]:
        """Return the attempts, by run id, that an agent was running here when it died: they have no result."""
        return [(run_id, one) for run_id, one in _files(self._running) if not (self._results / run_id).exists()]

    def results(self) -> list[tuple[str, Json]]:
        return _files(self._results)


def _files(folder: Path) -> list[tuple[str, Json]]:
    """Return name and content of the files in a folder, the oldest first, without incomplete ones (`.new`)."""
    found = sorted((one for one in folder.iterdir() if one.suffix != ".new"), key=lambda one: one.stat().st_mtime_ns)
    return [(one.name, json.loads(one.read_bytes())) for one in found]


def _write(path: Path, value: Json) -> None:
    new = path.with_name(path.name + ".new")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
