"""The program, loaded once: for each request it forks a process that goes on as `ecluse …` with arguments, environment
and output of its own. Importing takes a second or more; a table of mistakes should not pay it for each row."""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

import typer.rich_utils  # noqa: F401 - what the commands import when they run

import ecluse.cli.doctor
import ecluse.cli.watch
import ecluse.engine.kit
import ecluse.flows.audits.flow
import ecluse.flows.automation.flow
import ecluse.flows.automation.start
import ecluse.flows.transcriptions.flow
import ecluse.migrations.runner
import ecluse.vendors.price_list  # noqa: F401
from ecluse.cli.main import main as program


def become(request: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.modules["__main__"].__package__ = None  # from which the name in "Usage: …" is guessed
    sys.argv = ["ecluse", *request["arguments"]]
    sys.path[:0] = filter(None, request["environment"].get("PYTHONPATH", "").split(os.pathsep))
    for number, path in enumerate((os.devnull, request["stdout"], request["stderr"])):
        handle = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(handle, number)
        os.close(handle)


def main() -> None:
    gc.freeze()  # or every child would look through all of it before it ends
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            become(json.loads(line))
            program()
            return
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
