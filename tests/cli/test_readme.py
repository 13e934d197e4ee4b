"""README.md, "A first schedule": its commands are run as they stand there, on ports and in a directory of the test's
own, and print what it shows."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.command_line import ROOT, environment, free_port

pytestmark = pytest.mark.long
SECTION = "## A first schedule"
# The server answers as soon as it says so; a person who types takes longer than that.
UNTIL_SERVED = "until grep -q 'server: started' serve.log; do sleep 0.1; done"


def commands() -> str:
    """Return the commands of the section as a script: lines after a `$`, and the lines that continue them."""
    section = (ROOT / "README.md").read_text().split(f"{SECTION}\n", 1)[1].split("\n## ", 1)[0]
    script: list[str] = []
    for block in re.findall(r"```console\n(.*?)```", section, re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                script.append(line.removeprefix("$ "))
            elif line.startswith("      "):
                script[-1] += f"\n{line}"
    assert len(script) > 15
    return "\n".join(line for line in script if "activate" not in line)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A directory that the account of the embedded PostgreSQL may enter."""
    with tempfile.TemporaryDirectory(prefix="ecl-") as name:
        Path(name).chmod(0o711)
        yield Path(name)


@pytest.mark.timeout(180)
def test_a_newcomer_gets_what_the_page_shows(open_folder: Path) -> None:
    port, vendors = free_port(), free_port()
    script = commands().replace("8089", str(vendors)).replace("8080", str(port))
    script = script.replace("ecluse serve 2> serve.log &", f"ecluse serve 2> serve.log &\n{UNTIL_SERVED}")
    script = script.replace("curl -sN -m 5 ", "curl -sN -m 10 ")  # beside other tests a run takes longer
    # The id of the second run is that of the answer, as a reader would type it.
    script = re.sub(r"(api \S+/api/automation/trigger .*)", r"\1 | tee trigger.json", script)
    script = script.replace("RUN=25", "RUN=$(grep -o '[0-9]*' trigger.json | head -1)")
    script = script.replace("runs redrive 1 ", "runs redrive 1 --yes ") + "\nkill $(jobs -p); wait"
    run = subprocess.Popen(
        ["bash", "-u", "-c", script],
        cwd=open_folder,
        env=environment(PATH=f"{ROOT}/.venv/bin:{os.environ['PATH']}", ECLUSE_DATA_DIR=str(open_folder / "data"),
                        ECLUSE_PORT=str(port)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = run.communicate(timeout=150)
    finally:
        with suppress(ProcessLookupError):  # the script has ended them
            os.killpg(run.pid, signal.SIGTERM)
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
    assert "ecluse: " not in said, said  # how a command begins to say that it failed
