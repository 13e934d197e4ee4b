"""The declaration of a route's command on the command line. The OpenAPI document has it as `x-command`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Result:
    """What a command shows when its run has ended (`--wait`): `fields` of the read named `read`, whose path has the
    `id` of the command's answer, and `next`, the command to type next, with the fields in braces. `next` is shown only
    if all fields have values; else the field `otherwise` is, which says why there is no next command."""

    read: str
    fields: Sequence[str]
    next: str
    otherwise: str


@dataclass(frozen=True)
class Command:
    """The command of a route on the command line. Path parameters and `arguments`, which are fields of the body, are
    positional; all other fields are options."""

    name: str  # the words after `ecluse`
    columns: Sequence[str] = ()  # of its table; by default all fields that are not objects
    arguments: Sequence[str] = ()
    options: Mapping[str, str] = field(default_factory=dict)  # short name → field, `selection.days` for a nested one
    preview: str = ""  # name of the read that shows what would change, before the command asks for a confirmation
    follows: str = ""  # field of the answer with the id of a run: the command has --wait
    result: Result | None = None
    empty: str = ""  # text that is shown for an empty list
    text: str = ""  # field of the rows that is printed as it is, in place of a table; `columns` head its parts
    hides: Sequence[str] = ()  # fields of the answer or the preview that only --json shows: other fields say the same
    example: str = ""


def as_extra(command: Command | None) -> dict[str, Any]:
    if command is None:
        return {}
    return {"x-command": {name: value for name, value in asdict(command).items() if value}}
