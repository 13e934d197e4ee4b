"""Logging for the whole program: structlog through the standard library, so that libraries' lines look like ours.

A record has two forms: `line` for people (`[AREA|ids] STEP: what name=value`), and `json` for log collectors, with a
fixed set of mandatory fields. In both forms a record is one line, whatever its data: no data can end the line, colour
it or imitate the beginning of another, and secrets are hidden.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from pathlib import PurePath
from typing import Any, Literal

import structlog
from structlog.typing import EventDict, WrappedLogger

from ecluse.base.errors import EcluseError
from ecluse.base.masking import masked, masked_value

MANDATORY = (
    "timestamp",
    "level",
    "correlation_id",
    "tenant_id",
    "request_id",
    "job_id",
    "company_siren",
    "source_api",
    "event_type",
    "http_status",
    "error_code",
    "error_message",
    "duration_ms",
)
VERBS = {"debug": "STEP:", "info": "STEP:", "warning": "!! WARN:"}
# Fields shown in the head of the line, or of no use at a terminal.
NOT_IN_A_LINE = {"area", "ids", "event", "event_type", "verb", "level", "logger", "timestamp", "job_id"}
FRAMES = 8
BARE = re.compile(r"[\w./:@+,%#=*…-]+")
PREFIX = re.compile(r"\[(?=[\w-]+\|)")


def configure(level: str = "INFO", form: Literal["line", "json"] = "line") -> None:
    """Set up logging of the whole process to stderr: `level` is the lowest level that is logged, `form` the format of a
    record."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        # The level is tested first, so that a line below it costs nothing.
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                _record,
                _as_json if form == "json" else _as_line,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    # At INFO they log every URL in full, including its signature.
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # DBOS owns its logger and would print the database URL and an advertisement at INFO.
    dbos = logging.getLogger("dbos")
    dbos.handlers[:] = [handler]
    dbos.propagate = False
    dbos.setLevel(logging.WARNING)


def _record(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Complete a log record: rename `error` and `code` to `error_message` and `error_code`, fill them from an exception
    where they are not given, and add `job_id` and `event_type`."""
    error = event.pop("exc_info", None)
    error = sys.exc_info()[1] if error is True else error[1] if isinstance(error, tuple) else error
    if isinstance(error, BaseException):
        event["exception"] = error
        event.setdefault("error", str(error) or type(error).__name__)
        event.setdefault("code", error.code if isinstance(error, EcluseError) else type(error).__name__)
    for short, name in (("error", "error_message"), ("code", "error_code")):
        if short in event:
            event[name] = event.pop(short)
    if "run_id" in event:
        event.setdefault("job_id", str(event["run_id"]))
    event.setdefault("event_type", event["event"])
    return event


def _as_json(_: WrappedLogger, __: str, event: EventDict) -> str:
    """Render a record as one line of JSON, with all mandatory fields."""
    error = event.pop("exception", None)
    if error is not None:
        event["exception"] = "".join(traceback.format_exception(error))
    # ASCII only: no character that some reader takes for the end of a line is written.
    return json.dumps(masked_value({**dict.fromkeys(MANDATORY), **event}))


def _as_line(_: WrappedLogger, __: str, event: EventDict) -> str:
    """Render a record as one line for people, with the last FRAMES calls of an exception's traceback."""
    error = event.pop("exception", None)
    if error is not None:
        frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
        event["raised"] = " < ".join(f"{PurePath(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames))
    parts = str(event.get("logger") or "ecluse").split(".")
    area = event.get("area") or (parts[-1] if parts[0] == "ecluse" else parts[0]).upper()
    run = f"run-{event['run_id']}" if event.get("run_id") else "-"
    ids = event.get("ids") or run
    if ids == run:
        event.pop("run_id", None)
    verb = event.get("verb") or VERBS.get(str(event.get("level")), "!! ERROR:")
    data = masked_value({name: value for name, value in event.items() if name not in NOT_IN_A_LINE})
    shown = " ".join(f"{harmless(name)}={_value(value)}" for name, value in data.items() if value is not None)
    head = f"[{harmless(str(area))}|{harmless(masked(str(ids)))}] {verb} {harmless(masked(str(event['event'])))}"
    return f"{head}{' ' if shown else ''}{shown} at={event.get('timestamp')}"


def _value(value: Any) -> str:
    if isinstance(value, str) and BARE.fullmatch(value):
        return value
    return harmless(json.dumps(value, ensure_ascii=False))


def harmless(text: str) -> str:
    """Escape all characters that are not printable, and the bracket of text that looks like the head of a log line."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)
    return PREFIX.sub(r"\\u005b", text) if "[" in text else text
