"""The pinned packages of a requirements file as uv writes it: a line `name==version ; marker`, and below it, as a
comment, the packages that need it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from packaging.utils import canonicalize_name

PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)(\[[^]]*\])?==(?P<version>[^\s;\\]+)")
VIA = re.compile(r"^    #(?: via)? +(?P<names>.+)$")


class Pinned(NamedTuple):
    name: str
    version: str
    needed_by: list[str]  # packages of the same file, and the project's own file


def read(file: Path) -> list[Pinned]:
    """Return the packages in the order of the file; a package that is pinned for several platforms may occur twice."""
    found: list[Pinned] = []
    for line in file.read_text().splitlines():
        if pin := PIN.match(line):
            found.append(Pinned(canonicalize_name(pin["name"]), pin["version"], []))
        elif found and (via := VIA.match(line)):
            found[-1].needed_by.extend(one.strip() for one in via["names"].split(",") if one.strip() != "via")
    return found
