"""The commands `ecluse demo …`: set up logging, play a demonstration, and end it on Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable

from ecluse import settings
from ecluse.base import logging
from ecluse.base.errors import SetUpError
from ecluse.cli import show
from ecluse.cli.failure import INTERRUPTED
from ecluse.demo import automation as automation_demo
from ecluse.demo import enrichment as enrichment_demo
from ecluse.demo import jobs as jobs_demo
from ecluse.demo import pricing as pricing_demo
from ecluse.demo import transcription as transcription_demo


def automation(fiches: int, *, keep: bool, as_json: bool, given_database: bool) -> int:
    given = _given(given_database)
    return _play(lambda: automation_demo.run(fiches=fiches, keep=keep, as_json=as_json, given=given))


def pricing(*, keep: bool, as_json: bool, given_database: bool) -> int:
    given = _given(given_database)
    return _play(lambda: pricing_demo.run(keep=keep, as_json=as_json, given=given))


def enrichment(*, keep: bool, as_json: bool, given_database: bool) -> int:
    given = _given(given_database)
    return _play(lambda: enrichment_demo.run(keep=keep, as_json=as_json, given=given))


def jobs(*, keep: bool, as_json: bool) -> int:
    return _play(lambda: jobs_demo.run(keep=keep, as_json=as_json))


def transcription(*, as_json: bool) -> int:
    return _play(lambda: transcription_demo.run(as_json=as_json))


def _given(wanted: bool) -> str | None:
    """Return DATABASE_URL if `wanted`, else None. Raise SetUpError if it is wanted and not set."""
    given = settings.load().DATABASE_URL if wanted else None
    if wanted and given is None:
        raise SetUpError("--given-database needs DATABASE_URL: set it to the URL of an empty database.")
    return given


def _play(play: Callable[[], int]) -> int:
    logging.configure("WARNING")
    try:
        return play()
    except KeyboardInterrupt:
        show.say("demonstration stopped: its processes and temporary files are removed")
        return INTERRUPTED
