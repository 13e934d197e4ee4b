"""Measures how many cores the server, the attacker, the victim and all other programs used."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from pathlib import Path

import aiohttp

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def busy_seconds() -> float:
    """Return how long the cores of this machine have been busy."""
    user, nice, system = (int(one) for one in Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / CLOCK_TICKS


async def used(session: aiohttp.ClientSession) -> Counter[str]:
    """Return the seconds of a core that were used so far: by the server, by this process, by all."""
    async with session.get("/metrics") as answer:
        found = re.search(r"^process_cpu_seconds_total (\S+)$", await answer.text(), re.MULTILINE)
    assert found is not None
    now = {"server": float(found[1]), "victim": time.process_time(), "all": busy_seconds(), "": time.monotonic()}
    return Counter(now)


def per_second(before: Counter[str], after: Counter[str], attacker: float) -> dict[str, float]:
    """Return how many cores were used by whom."""
    spent = {name: after[name] - before[name] for name in before}
    seconds = spent.pop("")
    cores = {name: value / seconds for name, value in spent.items()} | {"attacker": attacker / seconds}
    cores["database and others"] = 2 * cores["all"] - sum(cores.values())
    return {name: round(value, 2) for name, value in cores.items()}
