"""Static files (scripts, styles, the icon), kept in memory. Their address contains a digest of all of them, so that
browsers may cache them forever."""

from __future__ import annotations

import gzip
import hashlib
from functools import cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable

TYPES = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
PATH = "/ui/static"


class File:
    def __init__(self, kind: str, plain: bytes) -> None:
        self.type, self.plain = kind, plain

    @cached_property
    def gzipped(self) -> bytes:
        """The compressed content, made on first use: the largest file takes a tenth of a second."""
        return gzip.compress(self.plain, mtime=0)


def _found(folder: Traversable, path: str = "") -> dict[str, File]:
    found: dict[str, File] = {}
    for entry in folder.iterdir():
        name = f"{path}{entry.name}"
        if entry.is_dir():
            found |= _found(entry, f"{name}/")
        elif kind := TYPES.get(name.rpartition(".")[2]):
            found[name] = File(kind, entry.read_bytes())
    return dict(sorted(found.items()))


FILES = _found(files("ecluse.web") / "static")
VERSION = hashlib.sha256(b"".join(file.plain for file in FILES.values())).hexdigest()[:12]


def address(name: str) -> str:
    assert name in FILES, name  # noqa: S101 - given in a template, never by a caller
    return f"{PATH}/{VERSION}/{name}"
