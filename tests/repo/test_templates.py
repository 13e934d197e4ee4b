"""Tables of the pages scroll by themselves: a table that is wider than a phone must not make its page wider."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TEMPLATES = Path(__file__).resolve().parents[2] / "src/ecluse/web/templates"
TABLE = re.compile(r"^(.*)\n.*<table\b", re.MULTILINE)


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.html")), ids=lambda path: path.name)
def test_every_table_is_in_a_container_that_scrolls(path: Path) -> None:
    text = path.read_text()
    before = TABLE.findall(text)
    assert len(before) == len(re.findall(r"<table\b", text))
    assert [line for line in before if 'class="overflow-auto"' not in line] == []
