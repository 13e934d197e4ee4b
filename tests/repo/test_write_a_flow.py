"""docs/write-a-flow.md: its code is what `ecluse new` writes, and that works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ecluse.base.errors import InvalidInput
from ecluse.cli.new import create

PAGE = Path(__file__).parents[2] / "docs" / "write-a-flow.md"


def blocks() -> list[str]:
    return [part.split("```")[0] for part in PAGE.read_text().split("```python\n")[1:]]


def test_the_page_shows_what_the_command_writes(tmp_path: Path) -> None:
    create("price_sync", tmp_path)
    flow = (tmp_path / "price_sync/price_sync/flow.py").read_text()
    assert blocks()[:2] == [flow, (tmp_path / "price_sync/tests/test_flow.py").read_text()]
    assert len(flow.splitlines()) < 60


def test_the_test_that_the_command_writes_passes(tmp_path: Path) -> None:
    create("price_sync", tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "price_sync"), *sys.path])}
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "tests"]
    done = subprocess.run(
        command, cwd=tmp_path / "price_sync", env=environment, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.parametrize("name", ["Price", "1st", "a-b", "", "a" * 51])
def test_a_name_that_cannot_be_a_module_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="is no name of a flow: use lower-case letters"):
        create(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(InvalidInput, match="exists already"):
        create("mine", tmp_path)
    assert list((tmp_path / "mine").iterdir()) == []
