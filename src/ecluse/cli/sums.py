"""Result counts of a run as text, the same in every command; cancelled targets are counted apart from failed ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ecluse.base.logging import harmless


def in_full(row: Mapping[str, Any]) -> str:
    parts = [f"{row['successful']} successful", f"{row['failed'] - row['cancelled']} failed"]
    parts += [f"{row['cancelled']} cancelled"] if row["cancelled"] else []
    return f"{row['selected'] or 0} = {' + '.join([*parts, str(row['ignored']) + ' ignored'])}"


def in_short(row: Mapping[str, Any]) -> str:
    """Return the counts for a line of a list: successful + failed + ignored, and cancelled if any."""
    cancelled = f" + {row['cancelled']} cancelled" if row["cancelled"] else ""
    return f"{row['successful']}+{row['failed'] - row['cancelled']}+{row['ignored']}{cancelled}"


def word(row: Mapping[str, Any]) -> str:
    """Return the status to show: the flow's own status, or `cancelled` for a cancelled run."""
    return "cancelled" if row["state"] == "cancelled" else str(row["status"])


def cancelled_by(row: Mapping[str, Any]) -> str:
    who = row["ended_by"] or "an operator"
    return harmless(f"cancelled with run {who[4:]}" if who.startswith("run:") else f"cancelled by {who}")
