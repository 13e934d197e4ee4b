"""README.md, "A first schedule": its commands are run as they stand there, and print what it shows."""

from __future__ import annotations

import re

import pytest

from tests.support.walks import walk

pytestmark = pytest.mark.long


def typed(script: str) -> str:
    script = script.replace("curl -sN -m 5 ", "curl -sN -m 10 ")  # beside other tests a run takes longer
    # The id of the second run is that of the answer, as a reader would type it.
    script = re.sub(r"(api \S+/api/automation/trigger .*)", r"\1 | tee trigger.json", script)
    script = script.replace("RUN=25", "RUN=$(grep -o '[0-9]*' trigger.json | head -1)")
    return script.replace("runs redrive 1 ", "runs redrive 1 --yes ")


@pytest.mark.timeout(180)
def test_a_newcomer_gets_what_the_page_shows() -> None:
    said = walk("README.md", "## A first schedule", typed)
    # How many fiches were sold yesterday depends on the day.
    ended = re.search(
        r"run 1 automation: partial in .*: (\d+) = (\d+) successful \+ (\d+) failed \+ (\d+) ignored", said
    )
    assert ended, said
    selected, *outcomes = map(int, ended.groups())
    assert selected == sum(outcomes) > 10
    assert re.search(r"^target +outcome +error code +reason$", said, re.MULTILINE), said
    assert re.search(r"^\d+ +failed +NO_URL ", said, re.MULTILINE), said
    assert '"success":true,"run_id":"' in said, said
    assert "event: automation.run.completed" in said, said
