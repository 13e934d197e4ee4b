"""Stamps wheels and source archives with the commit that they are built from. An archive carries its stamp along, so
that a wheel built from it has the same; an editable installation asks its repository instead."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

STAMP = "ecluse/_commit"


class StampCommit(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        git = shutil.which("git") if (root / ".git").exists() else None
        if version == "editable" or git is None:
            return
        command = [git, "-C", str(root), "rev-parse", "--short=9", "HEAD"]
        asked = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if asked.returncode == 0:
            self._folder = tempfile.TemporaryDirectory()
            stamp = Path(self._folder.name) / "commit"
            stamp.write_text(asked.stdout)
            place = STAMP if self.target_name == "wheel" else f"src/{STAMP}"
            build_data["force_include"][str(stamp)] = place
