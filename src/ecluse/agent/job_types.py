"""Job types: what a payload means, and whether the agent's file allows it. Every type ends in a program that is run in
a process group of its own, so that all of them are limited and stopped in the same way."""

import json
import re
import shlex
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ecluse.agent.settings import JobType

CLEAN = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "HOME": "/"}
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
DOTS = re.compile(r"(^|/)(\.|%2e){1,2}(/|$)", re.IGNORECASE)
LONGEST_NOOP = 3_600
# The program of type http, from this package or this zip file, in an interpreter that imports nothing else.
HTTP = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); from ecluse.agent import http_job as job"


class Rejected(Exception):  # the job is not run; the reason is its result
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Program(NamedTuple):
    arguments: list[str]
    environment: dict[str, str]
    given: str = ""  # on stdin


def program_of(types: dict[str, JobType], name: str, payload: Any) -> Program:
    """Return the program that this job runs. Raise Rejected if the agent's file or the payload does not allow it."""
    if name not in types:
        raise Rejected("UNKNOWN_TYPE", f"The agent's file has no job type {name!r} (known: {', '.join(types)}).")
    if not isinstance(payload, dict):
        raise Rejected("BAD_PAYLOAD", "The payload is not an object.")
    if name not in BUILT_IN:
        return Program(list(types[name].run), CLEAN, json.dumps(payload))
    return BUILT_IN[name](types[name], payload)


def _shell(allowed: JobType, payload: dict[str, Any]) -> Program:
    """Return the program of `command`: a list, or text that is split as a shell splits words. No shell runs it."""
    command, more = _fields(payload, command=((str, list), None), env=(dict, {}))
    try:
        words = shlex.split(command) if isinstance(command, str) else command
    except ValueError as error:
        raise Rejected("BAD_PAYLOAD", f"command: {error}") from error
    if not words or not all(isinstance(one, str) and "\0" not in one for one in words):
        raise Rejected("BAD_PAYLOAD", "command: a program and its arguments, all of them texts.")
    if not any(_matches(shlex.split(one), words) for one in allowed.allow):
        raise Rejected("NOT_ALLOWED", f"The agent's file does not allow this command of {words[0]!r}.")
    for name, value in more.items():
        if not VARIABLE.fullmatch(name) or not isinstance(value, str) or "\0" in value:
            raise Rejected("BAD_PAYLOAD", "env: names of variables, and texts as their values.")
        if not any(fnmatchcase(name, one) for one in allowed.env):
            raise Rejected("NOT_ALLOWED", f"The agent's file does not allow a payload to set {name}.")
    return Program(words, {**CLEAN, **more})


def _matches(pattern: list[str], words: list[str]) -> bool:
    """Return True if the words match the pattern, word by word. A last `*` stands for any further words, also none."""
    if pattern[-1:] == ["*"]:
        pattern, words = pattern[:-1], words[: len(pattern) - 1]
    return len(pattern) == len(words) and all(fnmatchcase(word, one) for one, word in zip(pattern, words, strict=True))


def _http(allowed: JobType, payload: dict[str, Any]) -> Program:
    """Return the program that calls `url`. It does not follow redirects: they would lead past the allow-list."""
    known: dict[str, Any] = {"url": (str, None), "method": (str, "GET"), "headers": (dict, {}), "body": (object, None)}
    url, method, headers, _ = call = _fields(payload, **known)
    if not re.fullmatch(r"[A-Z]{3,7}", method) or not all(isinstance(one, str) for one in headers.values()):
        raise Rejected("BAD_PAYLOAD", "method: capital letters; headers: texts by name.")
    if not any(_leads_to(one, url) for one in allowed.allow):
        raise Rejected("NOT_ALLOWED", "The agent's file does not allow this URL.")
    given = json.dumps(dict(zip(known, call, strict=True)))
    return Program([sys.executable, "-S", "-I", "-c", f"{HTTP}; sys.exit(job.main())"], CLEAN, given)


def _leads_to(allowed: str, url: str) -> bool:
    """Return True if the URL has the origin and path of `allowed`, compared as parts: `https://a.example` does not
    allow `https://a.example.net`. A path that ends with a slash allows all below it; `.` and `..` are never allowed."""
    here, there = urlsplit(allowed), urlsplit(url)
    path, wanted = here.path or "/", there.path or "/"
    if (here.scheme, here.netloc.lower()) != (there.scheme, there.netloc.lower()) or DOTS.search(wanted):
        return False
    printable = all(" " < one < "\x7f" and one != "\\" for one in url)
    return printable and (wanted == path or (path.endswith("/") and wanted.startswith(path)))


def _noop(_: JobType, payload: dict[str, Any]) -> Program:
    """Return a program that succeeds after `seconds`, which shows that jobs reach this host."""
    (seconds,) = _fields(payload, seconds=((int, float), 0))
    if not 0 <= seconds <= LONGEST_NOOP:
        raise Rejected("BAD_PAYLOAD", f"seconds: from 0 to {LONGEST_NOOP}.")
    return Program(["sleep", str(seconds)], CLEAN)


BUILT_IN: dict[str, Callable[[JobType, dict[str, Any]], Program]] = {"shell": _shell, "http": _http, "noop": _noop}


def _fields(payload: dict[str, Any], **known: tuple[Any, Any]) -> list[Any]:
    """Return the payload's values of `known` (name: type, default). Raise Rejected for other fields or types."""
    if unknown := sorted(set(payload) - set(known)):
        raise Rejected("BAD_PAYLOAD", f"unknown: {', '.join(unknown)} (known: {', '.join(known)}).")
    values = [payload.get(name, default) for name, (_, default) in known.items()]
    for value, (name, (kind, _)) in zip(values, known.items(), strict=True):
        if not isinstance(value, kind) or isinstance(value, bool):
            raise Rejected("BAD_PAYLOAD", f"{name}: missing, or not of its type.")
    return values
