"""docs/errors.md and docs/api.md are generated (`make docs`)."""

from pathlib import Path

import pytest

from tools.api_docs import PAGES, errors, overview

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_the_one_that_the_tables_print(name: str) -> None:
    assert (DOCS / f"{name}.md").read_text() == PAGES[name]()


def test_every_row_has_all_its_cells() -> None:
    for page in (errors(), overview()):
        tables = [part.splitlines() for part in page.split("\n\n") if part.startswith("| ")]
        assert tables
        for table in tables:
            assert {line.replace("\\|", "").count("|") for line in table} == {table[0].count("|")}
