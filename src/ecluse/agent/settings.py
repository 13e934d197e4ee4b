"""The agent's own file (TOML; deploy/agent.toml is an example). It alone says what may run on this host: a job type
without a table in it is refused, whatever the server asks for."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMITS: dict[str, tuple[int, int, int]] = {  # default, least, most
    "slots": (4, 1, 16),
    "stop_seconds": (30, 0, 86_400),
    "timeout_seconds": (3_600, 1, 7 * 86_400),
    "output_limit": (1_048_576, 0, 16_777_216),
}
LISTS = {"shell": ("allow", "env"), "http": ("allow",), "noop": ()}


@dataclass(frozen=True)
class JobType:  # what the file allows for one type of job
    timeout_seconds: int
    output_limit: int
    allow: Sequence[str] = ()
    env: Sequence[str] = ()
    run: Sequence[str] = ()  # of a type that is not built in


@dataclass(frozen=True)
class Settings:
    slots: int
    stop_seconds: int
    types: dict[str, JobType]


def load(path: Path) -> Settings:
    try:
        found = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}. It names the job types that may run here.") from error
    tables = {name: found.pop(name) for name, value in list(found.items()) if isinstance(value, dict)}
    if not tables:
        raise ValueError(f"{path} allows no job type: add a table such as [noop] or [shell] with its allow-list.")
    types = {}
    for name, table in tables.items():
        names = ("timeout_seconds", "output_limit", *LISTS.get(name, ("run",)))
        types[name] = JobType(**_read(f"{path} [{name}]", table, names))
        if name not in LISTS and not types[name].run:
            raise ValueError(f"{path} [{name}] is no built-in type ({', '.join(LISTS)}): give `run`, its program.")
    return Settings(**_read(str(path), found, ("slots", "stop_seconds")), types=types)


def _read(where: str, table: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    if unknown := sorted(set(table) - set(names)):
        raise ValueError(f"{where}: unknown {', '.join(unknown)} (known: {', '.join(names)}).")
    return {name: _value(f"{where}: {name}", name, table.get(name)) for name in names}


def _value(where: str, name: str, value: Any) -> Any:
    default, least, most = LIMITS.get(name, ([], 0, 0))
    value = default if value is None else value
    if name in LIMITS and (type(value) is not int or not least <= value <= most):
        raise ValueError(f"{where} must be a whole number from {least} to {most}.")
    if name not in LIMITS and not (isinstance(value, list) and all(isinstance(one, str) and one for one in value)):
        raise ValueError(f"{where} must be a list of texts.")
    return value
