"""What a declared route says about its command on the command line; it is in the OpenAPI document as `x-command`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Result:
    """What a command shows after `--wait`: these fields of a read, whose path has the `id` of the command's answer, and
    the next command, with fields in braces, if all of these fields have values."""

    read: str  # its name
    fields: Sequence[str]
    next: str


@dataclass(frozen=True)
class Command:
    """The command of a route on the command line. Path parameters and `arguments`, which are fields of the body, are
    positional; all other fields are options."""

    name: str  # the words after `ecluse`
    columns: Sequence[str] = ()  # of its table; by default all that are no objects
    arguments: Sequence[str] = ()
    options: Mapping[str, str] = field(default_factory=dict)  # short name → field, `selection.days` for a nested one
    preview: str = ""  # name of the read that shows what would change, before the command asks for a confirmation
    follows: str = ""  # field of the answer with the id of a run: the command has --wait
    result: Result | None = None
    empty: str = ""  # what to say of an empty list
    text: str = ""  # field of the rows that is printed as it is, in place of a table; `columns` head its parts
    hides: Sequence[str] = ()  # fields of the answer or the preview that only --json shows: others say the same
    example: str = ""


def as_extra(command: Command | None) -> dict[str, Any]:
    if command is None:
        return {}
    return {"x-command": {name: value for name, value in asdict(command).items() if value}}
