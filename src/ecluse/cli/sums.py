"""What came of a run, in words: one sum everywhere, with what was cancelled apart from what failed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ecluse.base.logging import harmless


def in_full(row: Mapping[str, Any]) -> str:
    parts = [f"{row['successful']} successful", f"{row['failed'] - row['cancelled']} failed"]
    parts += [f"{row['cancelled']} cancelled"] if row["cancelled"] else []
    return f"{row['selected']} = {' + '.join([*parts, str(row['ignored']) + ' ignored'])}"


def in_short(row: Mapping[str, Any]) -> str:
    """Of a list: successful + failed + ignored."""
    cancelled = f" + {row['cancelled']} cancelled" if row["cancelled"] else ""
    return f"{row['successful']}+{row['failed'] - row['cancelled']}+{row['ignored']}{cancelled}"


def word(row: Mapping[str, Any]) -> str:
    """How a run stands, for people: the flow's word, unless it was cancelled."""
    return "cancelled" if row["state"] == "cancelled" else str(row["status"])


def cancelled_by(row: Mapping[str, Any]) -> str:
    who = row["ended_by"] or "an operator"
    return harmless(f"cancelled with run {who[4:]}" if who.startswith("run:") else f"cancelled by {who}")
