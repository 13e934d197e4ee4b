"""Questions before a command acts. They go to stderr: stdout is for what a script reads."""

from __future__ import annotations

import sys

import typer

from ecluse.base.errors import EcluseError


class Unanswered(EcluseError):
    """A question without a terminal to answer it at: exit code 2."""

    code = "UNANSWERED"


def ask(question: str, *, yes: bool) -> None:
    """At a terminal; elsewhere `--yes` must have been given. A no ends the command."""
    if not yes and not choose(question):
        raise typer.Abort


def choose(question: str) -> bool:
    if not sys.stdin.isatty():
        raise Unanswered("Nothing was done: there is no terminal to ask at. Say --yes to do it without being asked.")
    return typer.confirm(question, err=True)
