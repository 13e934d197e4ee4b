"""Sections of documents whose commands are run as they stand there, on ports and in a directory of the test's own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.support.command_line import ROOT, environment, free_port

# The server answers as soon as it says so; a person who types takes longer than that.
SERVE = "ecluse serve 2> serve.log &"
UNTIL_SERVED = "until grep -q 'server: started' serve.log; do sleep 0.1; done"


def commands(page: str, section: str) -> str:
    """Return the commands of a section as a script: lines after a `$`, and the lines that continue them."""
    text = (ROOT / page).read_text().split(f"{section}\n", 1)[1].split("\n## ", 1)[0]
    script: list[str] = []
    for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                script.append(line.removeprefix("$ "))
            elif line.startswith("      ") and script[-1].count("'") % 2:  # an open quotation goes on
                script[-1] += f"\n{line}"
    assert len(script) > 15
    return "\n".join(line for line in script if "activate" not in line)


def walk(page: str, section: str, typed: Callable[[str], str] = str) -> str:
    """Run the commands of a section and return what they print. `typed` changes what a reader would type otherwise."""
    port, vendors = free_port(), free_port()
    script = typed(commands(page, section)).replace("8089", str(vendors)).replace("8080", str(port))
    assert SERVE in script
    script = script.replace(SERVE, f"{SERVE}\n{UNTIL_SERVED}") + "\nkill $(jobs -p); wait"
    with tempfile.TemporaryDirectory(prefix="ecl-") as folder:
        Path(folder).chmod(0o711)  # the account of the embedded PostgreSQL may enter it
        given = {"ECLUSE_DATA_DIR": f"{folder}/data", "ECLUSE_PORT": str(port)}
        run = subprocess.Popen(
            ["bash", "-u", "-c", script],
            cwd=folder,
            env=environment(PATH=f"{ROOT}/.venv/bin:{os.environ['PATH']}", **given),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = run.communicate(timeout=150)
        finally:
            with suppress(ProcessLookupError):  # the script has ended them
                os.killpg(run.pid, signal.SIGTERM)
    assert "ecluse: " not in said, said  # how a command begins to say that it failed
    return said
