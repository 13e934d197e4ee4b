"""A log message names its component and the action, `component: what happened`, so that an operator can search for it
(CONTRIBUTING.md). Lines of runs (`Tracer`) begin with their area instead: `[AUTOMATION|run-7] …`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src/ecluse"
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
# What stands for a computed part of a message. A component may be one.
COMPUTED = "…"
NAMED = re.compile(rf"(?:[A-Za-z-]+|{COMPUTED})(?: [A-Za-z]+)?: \S")
# Texts of the contract: a log line of enrichment is called like its event, and has the fields of ENR-70.
CONTRACT = {("flows/enrichment/events.py", "kind")}


def texts(message: ast.expr) -> list[str]:
    """Return the texts that the expression of a message may have; a name stands for itself, in <>."""
    match message:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.IfExp(body=one, orelse=other):
            return [*texts(one), *texts(other)]
        case ast.JoinedStr(values=parts):
            return ["".join(part.value if isinstance(part, ast.Constant) else COMPUTED for part in parts)]
    return [f"<{ast.unparse(message)}>"]


def messages(code: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each call of a logger, which is named `log` everywhere."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and any(is_level(one) for one in choices(node.func)):
            found = texts(node.args[0]) if node.args else ["<no message>"]
            yield from ((node.lineno, text) for text in found)


def choices(called: ast.expr) -> list[ast.expr]:
    return [called.body, called.orelse] if isinstance(called, ast.IfExp) else [called]


def is_level(called: ast.expr) -> bool:
    if not isinstance(called, ast.Attribute) or called.attr not in LEVELS:
        return False
    logger = ast.unparse(called.value)
    return logger == "log" or logger.endswith(".log")


def test_every_log_message_names_its_component() -> None:
    wrong, seen = [], 0
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        for line, text in messages(path.read_text()):
            seen += 1
            if not NAMED.match(text) and (name, text.strip("<>")) not in CONTRACT:
                wrong.append(f"{name}:{line}: {text}")
    assert wrong == []
    assert seen > 70, "the loggers are found"


def test_loggers_are_named_log() -> None:
    made = re.compile(r"^ *(\S+)(?:: \S+)? = structlog\.get_logger\(", re.MULTILINE)
    names = {name for path in SOURCE.rglob("*.py") for name in made.findall(path.read_text())}
    assert names == {"log"}


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ('log.info("outbox: sink rejected event, will retry")', True),
        ('log.info(f"{doing}: database unavailable")', True),
        ('log.info("lease released")', False),
        ('log.info(f"{doing} failed")', False),
        ('log.info("leases: released" if ok else "lost")', False),
        ("welcome.log.info(what)", False),
        ('log.info(event="outbox: sink rejected event")', False),
        ('(log.warning if begun else log.info)("knobs are unset")', False),
    ],
)
def test_the_check_finds_messages_without_a_component(code: str, named: bool) -> None:
    assert all(NAMED.match(text) for _, text in messages(code)) is named
