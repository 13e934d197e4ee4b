"""The program, loaded once: each request forks a process that goes on as `python -m MODULE …`, with arguments,
environment and output of its own. Many run at once; the start and the end of each are reported, one JSON line each.

Importing takes two seconds of a core, forking a hundredth: that makes hundreds of kills and commands affordable.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import sys
import threading
from typing import Any, NoReturn

import uvicorn.lifespan.on
import uvicorn.loops.auto
import uvicorn.protocols.http.auto  # noqa: F401

import ecluse.app
import ecluse.cli.database
import ecluse.cli.demos
import ecluse.cli.doctor
import ecluse.cli.welcome
import ecluse.migrations.runner
import ecluse.sandbox.server
import ecluse.vendors.price_list  # noqa: F401
from ecluse.base import crash
from ecluse.cli.main import main as command


def become(request: dict[str, Any]) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request["environment"])
    importlib.reload(crash)  # it reads the environment once, when it is loaded
    sys.modules["__main__"].__package__ = None  # from which the name in "Usage: …" is guessed
    sys.argv = [request["module"], *request["arguments"]]
    sys.path[:0] = filter(None, request["environment"].get("PYTHONPATH", "").split(os.pathsep))
    for number, path in enumerate((os.devnull, request["stdout"], request["stderr"])):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(handle, number)
        os.close(handle)
    gc.enable()
    try:
        if request["module"] == "ecluse":
            command()
        else:
            runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if request["arguments"][:1] == ["serve"]:  # its end is tested, to the last line
            raise
        leave(ended.code if isinstance(ended.code, int) else int(ended.code is not None))


def leave(code: int) -> NoReturn:
    """End as the interpreter does, but leave the modules as they are: to take them apart is to copy all the memory that
    is shared with the parent, which takes longer than most commands."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def say(**news: object) -> None:
    print(json.dumps(news), flush=True)


def reap(children: dict[int, int]) -> None:
    """Report the children that have ended; one signal may stand for several."""
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        say(id=children.pop(pid), code=os.waitstatus_to_exitcode(status))


def serve() -> dict[str, Any] | None:
    """In the parent: until the pipe of requests is closed. In a child: returns the request that it is to execute."""
    children: dict[int, int] = {}
    woken, wakes = os.pipe()
    for end in (woken, wakes):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    ready = selectors.DefaultSelector()
    ready.register(sys.stdin.fileno(), selectors.EVENT_READ)
    ready.register(woken, selectors.EVENT_READ)
    asked = b""
    while True:
        for key, _ in ready.select():
            if key.fd == woken:
                os.read(woken, 4096)
                reap(children)
                continue
            more = os.read(key.fd, 65536)
            if not more:  # the tests have ended, perhaps by a signal: no child may stay behind
                for pid in children:
                    os.kill(pid, signal.SIGKILL)
                return None
            *lines, asked = (asked + more).split(b"\n")
            for line in lines:
                request = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    ready.close()
                    return dict(request)
                children[pid] = request["id"]
                say(id=request["id"], pid=pid)


if __name__ == "__main__":
    gc.disable()
    gc.freeze()  # or every child would look through all of it, and copy it by doing so
    if (wanted := serve()) is not None:
        become(wanted)
