"""Scripts, styles and the icon: few and small, kept in memory as they are sent. Their address contains a digest of all
of them, so that browsers may cache them for ever."""

from __future__ import annotations

import gzip
import hashlib
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import NamedTuple

TYPES = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
PATH = "/ui/static"


class File(NamedTuple):
    type: str
    plain: bytes
    gzipped: bytes


def _found(folder: Traversable, path: str = "") -> dict[str, File]:
    found: dict[str, File] = {}
    for entry in folder.iterdir():
        name = f"{path}{entry.name}"
        if entry.is_dir():
            found |= _found(entry, f"{name}/")
        elif kind := TYPES.get(name.rpartition(".")[2]):
            found[name] = File(kind, plain := entry.read_bytes(), gzip.compress(plain, mtime=0))
    return dict(sorted(found.items()))


FILES = _found(files("ecluse.web") / "static")
VERSION = hashlib.sha256(b"".join(file.plain for file in FILES.values())).hexdigest()[:12]


def address(name: str) -> str:
    assert name in FILES, name  # noqa: S101 - given in a template, never by a caller
    return f"{PATH}/{VERSION}/{name}"
