"""`ecluse new NAME`: create a folder with a flow that works, its test, and the entry point by which servers find it."""

from __future__ import annotations

import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from ecluse.base.errors import InvalidInput

NAME = re.compile(r"[a-z][a-z0-9_]{0,49}")
TEMPLATE = "my_flow"


def create(name: str, where: Path) -> list[Path]:
    """Create the folder `name` in `where` from the template of a flow; return its files. Raise InvalidInput if the name
    is not valid or the folder exists already."""
    if not NAME.fullmatch(name):
        raise InvalidInput(f"{name!r} is no name of a flow: use lower-case letters, digits and '_', such as price_sync")
    if (where / name).exists():
        raise InvalidInput(f"{name} exists already: choose another name, or remove it")
    written = []
    for path, source in _files(files("ecluse.cli") / "template"):
        target = where / name / path.replace(TEMPLATE, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(source.read_text().replace(TEMPLATE, name))
        written.append(target)
    return written


def _files(folder: Traversable, below: str = "") -> list[tuple[str, Traversable]]:
    found = []
    for one in sorted(folder.iterdir(), key=lambda one: one.name):
        if one.is_dir():
            found += [] if one.name == "__pycache__" else _files(one, f"{below}{one.name}/")
        else:
            found.append((f"{below}{one.name}", one))
    return found
