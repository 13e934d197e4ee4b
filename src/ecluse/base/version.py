"""The version of the package, and the commit that it was built from or runs from."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from importlib.metadata import version as installed
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
STAMP = PACKAGE / "_commit"  # written into wheels and archives, by hatch_build.py
CHECKOUT = PACKAGE.parents[1]
PATIENCE_SECONDS = 2.0


@cache
def commit() -> str | None:
    """Return the short commit id; None if the package was built outside of a repository, or git cannot be asked."""
    if STAMP.exists():
        return STAMP.read_text().strip() or None
    git = shutil.which("git") if (CHECKOUT / ".git").exists() else None
    if git is None:
        return None
    command = [git, "-C", str(CHECKOUT), "rev-parse", "--short=9", "HEAD"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() or None if asked.returncode == 0 else None


def release() -> str:
    """Return the version of the installed package, without the commit."""
    return installed("ecluse")


def version() -> str:
    """Return the version with the commit, if known, as `0.1.0+g6330d9b12`."""
    found = commit()
    return f"{release()}+g{found}" if found else release()
