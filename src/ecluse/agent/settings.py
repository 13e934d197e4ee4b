"""The agent's own file (TOML; deploy/agent.toml is an example). It alone says what may run on this host: a job type
without a table in it is refused, whatever the server asks for."""

from __future__ import annotations

import tomllib
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


class BadFile(Exception):
    pass


@dataclass(frozen=True)
class JobType:
    """What the file allows for one type of job."""

    timeout_seconds: int
    output_limit: int
    allow: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    run: tuple[str, ...] = ()  # of a type that is not built in


@dataclass(frozen=True)
class Settings:
    slots: int
    stop_seconds: int
    types: dict[str, JobType]


def load(path: Path) -> Settings:
    try:
        found = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadFile(f"{path} cannot be read: {error}. It names the job types that may run on this host.") from error
    tables = {name: found.pop(name) for name, value in list(found.items()) if isinstance(value, dict)}
    if not tables:
        raise BadFile(f"{path} allows no job type: add a table such as [noop] or [shell] with its allow-list.")
    general = _read(str(path), found, ("slots", "stop_seconds"))
    return Settings(**general, types={name: _job_type(f"{path} [{name}]", name, one) for name, one in tables.items()})


def _job_type(where: str, name: str, table: dict[str, Any]) -> JobType:
    values = _read(where, table, ("timeout_seconds", "output_limit", *LISTS.get(name, ("run",))))
    if name not in LISTS and not values["run"]:
        raise BadFile(f"{where} is no built-in type ({', '.join(LISTS)}): give `run`, the program and its arguments.")
    return JobType(**values)


def _read(where: str, table: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    if unknown := sorted(set(table) - set(names)):
        raise BadFile(f"{where}: unknown {', '.join(unknown)} (known: {', '.join(names)}).")
    return {name: _value(f"{where}: {name}", name, table.get(name)) for name in names}


def _value(where: str, name: str, value: Any) -> Any:
    if name in LIMITS:
        default, least, most = LIMITS[name]
        value = default if value is None else value
        if type(value) is not int or not least <= value <= most:
            raise BadFile(f"{where} is a whole number from {least} to {most}.")
        return value
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(one, str) and one.strip() for one in value):
        raise BadFile(f"{where} is a list of texts.")
    return tuple(value)
