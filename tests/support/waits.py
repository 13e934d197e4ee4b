"""Waiting for a condition in a test that is no coroutine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE = 30.0


def wait_for(condition: Callable[[], Any]) -> Any:
    until = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)
    return value
