"""docs/sandbox.md, "Pricing and enrichment by hand": its commands are run as they stand there, and every line that it
shows is printed, apart from times."""

from __future__ import annotations

import re

import pytest

from tests.support.command_line import ROOT
from tests.support.walks import walk

pytestmark = pytest.mark.long
PAGE, SECTION = "docs/sandbox.md", "## Pricing and enrichment by hand"
TIMES = re.compile(r" in [0-9.]+ s\b|\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ| +")


def shown() -> list[str]:
    """Return the lines of output that the section shows."""
    text = (ROOT / PAGE).read_text().split(f"{SECTION}\n", 1)[1].split("\n## ", 1)[0]
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line and not line.startswith("$ ")]


@pytest.mark.timeout(180)
def test_prices_and_companies_by_hand_are_what_the_page_shows() -> None:
    # Answers of the sandbox have no line end.
    said = walk(PAGE, SECTION, lambda script: re.sub(r"^(curl .*)$", r"\1; echo", script, flags=re.MULTILINE))
    printed = {TIMES.sub(" ", line).strip() for line in said.splitlines()}
    missing = [line for line in shown() if TIMES.sub(" ", line).strip() not in printed]
    assert missing == [], said
    assert len(shown()) > 30
