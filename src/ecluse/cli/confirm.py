"""Confirmation questions of commands. They go to stderr: stdout is for the output that scripts read."""

from __future__ import annotations

import sys

import typer

from ecluse.base.errors import EcluseError


class Unanswered(EcluseError):
    """A confirmation is needed, but stdin is no terminal: exit code 2."""

    code = "UNANSWERED"


def ask(question: str, *, yes: bool) -> None:
    """Ask for confirmation at the terminal, unless `yes`. The answer no aborts the command."""
    if not yes and not choose(question):
        raise typer.Abort


def choose(question: str) -> bool:
    if not sys.stdin.isatty():
        raise Unanswered("Nothing was done: confirmation is required, but stdin is no terminal. Use --yes to confirm.")
    return typer.confirm(question, err=True)
