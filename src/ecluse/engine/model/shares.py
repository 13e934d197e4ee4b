"""Shares of what the owners of a process use together: worker slots, and runs that it may lead."""

from __future__ import annotations


def share_left(share: float, most: int, held: int, others: int) -> int:
    """Return how many more of `most` an owner may take that holds `held` of them, while all other owners hold `others`:
    its share of what the others leave, so that some is left for the next owner. Every owner may have one. Negative: it
    holds more than its share."""
    return max(1, int(share * (most - others))) - held
