"""What came of a run, in words: one sum everywhere, with what was cancelled apart from what failed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import typer

from ecluse.base.errors import EcluseError
from ecluse.base.logging import harmless


class Unanswered(EcluseError):
    """A question that nobody is there to answer: exit code 2."""

    code = "UNANSWERED"


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


def ask(question: str, *, yes: bool) -> None:
    """At a terminal; elsewhere `--yes` must have been given. A no ends the command."""
    if not yes and not choose(question):
        raise typer.Abort


def choose(question: str) -> bool:
    if not sys.stdin.isatty():
        raise Unanswered("Nothing was done: there is no terminal to ask at. Say --yes to do it without being asked.")
    return typer.confirm(question, err=True)
