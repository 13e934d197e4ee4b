"""Chance that repeats itself."""

import random


def seeded(seed: int = 0) -> random.Random:
    return random.Random(seed)  # noqa: S311 - the point is that it can be foreseen
