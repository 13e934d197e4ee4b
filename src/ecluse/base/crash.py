"""Crash points: named places at which a test can kill the process, to prove that a crash there loses nothing.

They are off unless ECLUSE_CRASH_AT names one of them, or a step of a story (`after_step`).
"""

from __future__ import annotations

import os
import signal

POINTS = (
    "before workflow start",
    "after workflow start",
    "after take",
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
POINTS_OF_ROTATION = ("in rotation", "after rotation")

_armed = os.environ.get("ECLUSE_CRASH_AT")


def after_step(name: str) -> str:
    """Return the name of the crash point that lies after a step's work and before its completion is recorded; after a
    crash there, the step runs again."""
    return f"after step {name}"


def crashpoint(name: str) -> None:
    """Kill this process (SIGKILL) if ECLUSE_CRASH_AT names this crash point; otherwise do nothing."""
    if _armed == name:
        os.kill(os.getpid(), signal.SIGKILL)
