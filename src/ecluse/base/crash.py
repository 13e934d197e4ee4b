"""Named places at which a test can have the process killed: durability is a claim until something was killed there.

Off unless ECLUSE_CRASH_AT names one of them, or a step of a story (`after_step`).
"""

from __future__ import annotations

import os
import signal

POINTS = (
    "after run insert",
    "after begin",
    "after select",
    "in fan-out",
    "after fan-out",
    "after claim",
    "after intent",
    "before send",
    "after send",
    "before commit",
    "in commit",
    "after commit",
    "after hint",
    "at gate",
    "after gate end",
    "in finalize",
    "after finalize",
)
POINTS_OF_A_TICK = ("in tick", "after tick")
POINTS_OF_AUTOMATION = ("in dispatch",)
POINTS_OF_RETENTION = ("in prune", "after prune")

_armed = os.environ.get("ECLUSE_CRASH_AT")


def after_step(name: str) -> str:
    """When its work is done, and that it is done is not recorded: it will be done once more."""
    return f"after step {name}"


def crashpoint(name: str) -> None:
    if _armed == name:
        os.kill(os.getpid(), signal.SIGKILL)
