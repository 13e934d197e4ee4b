"""Nothing in the repository may tell on which machine, or through which registry, it was written."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Bracketed first letters keep the patterns from matching this file.
DIRECTORIES = r"(?<![\w.})>*-])/(?:[r]oot|[h]ome|[w]ork|[U]sers)/"
REGISTRIES = r"[p]ypi[./-]|[p]ythonhosted\.|[r]egistry\.npmjs|[i]ndex-url|[f]ind-links"
TELLTALE = re.compile(f"{DIRECTORIES}|{REGISTRIES}")


def tracked_files() -> list[Path]:
    # The user who runs the tests need not own the checkout, which git requires otherwise.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


@pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="not a git checkout")
def test_no_tracked_file_names_a_machine_or_a_registry() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for file in tracked_files()
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), start=1)
        if TELLTALE.search(line)
    ]
    assert found == []
