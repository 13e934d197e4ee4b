"""docs/configuration.md is generated (`make docs`): it says what the program reads, neither less nor more."""

from pathlib import Path

import pytest

from ecluse.settings import Settings, reference

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


@pytest.mark.req("ENG-100")
def test_the_configuration_page_is_the_one_that_the_settings_print() -> None:
    assert DOCUMENT.read_text() == reference()


def test_the_page_has_a_row_with_default_and_meaning_for_each_knob() -> None:
    rows = [line.strip("|").split(" | ") for line in reference().splitlines() if line.startswith("| `")]
    assert [row[0].strip(" `") for row in rows] == list(Settings.model_fields)
    assert all(len(row) == 3 and row[1].strip() and row[2].strip().endswith(".") for row in rows)
