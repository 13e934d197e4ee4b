"""The arguments of a command of a server: its parser, made from the command's declared fields, and the request made
from the parsed values."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

from ecluse.cli.failure import meant, misused

Json = dict[str, Any]
NUMBERS = {"integer": int, "number": float}
FIELD = re.compile(r"(^|; )(?:(?:body|query|path)\.)?([\w.]+): ", re.IGNORECASE)  # the field that a problem is about
IN_SENTENCE = re.compile(r"(?<!['\"\w.-])[a-z]+(?:_[a-z]+)+(?!['\"\w.]\w)")  # quoted text is a value
HELP_FIRST = 36  # column at which the explanations begin


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=HELP_FIRST)

    def add_usage(self, _: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        places = "".join(
            f" {one.metavar}{'…' if one.nargs == '*' else ''}" for one in actions if not one.option_strings
        )
        super().add_usage(f"%(prog)s{places} [options]", actions, groups, prefix or "Usage: ")


class Parser(argparse.ArgumentParser):
    """Argument parser of a command. Wrong usage raises Failure with a message that suggests the most similar option, if
    one is similar."""

    def __init__(self, prog: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=prog,
            description="\n".join(textwrap.wrap(description, min(100, shutil.get_terminal_size().columns))).replace(
                "%", "%%"
            ),
            epilog=epilog,
            allow_abbrev=False,
            add_help=False,
            formatter_class=_Help,
        )
        self.add_argument("-h", "--help", action="help", help="show this help and exit")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        given, rest = self.parse_known_args(words)
        if rest:
            option = next((word for word in rest if word.startswith("-")), None)
            if option is None:
                flags = argparse.BooleanOptionalAction
                named = [one for one in self._actions if one.option_strings and (one.metavar or isinstance(one, flags))]
                only = [[n for n in one.option_strings if not n.startswith("--no-")][-1] for one in named]
                takes = any(not one.option_strings for one in self._actions)
                hint = "" if takes or not only else f" This command takes options only: {', '.join(only)}."
                self.error(f"unexpected argument {rest[0]!r}.{hint}")
            name = option.partition("=")[0]
            self.error(f"there is no option {name}.{meant(name, self.options())}")
        return given

    def options(self) -> list[str]:
        return list(self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        message = message.replace("the following arguments are required", "missing")
        raise misused(f"{message.rstrip('.?')}{'?' if message.endswith('?') else '.'} See `{self.prog} --help`.")


def parser_for(command: Json, epilog: str = "") -> Parser:
    example = f"example:\n  ecluse {command['example']}\n" if "example" in command else ""
    parser = Parser(f"ecluse {command['name']}", command["help"], example + epilog)
    fields = command["fields"]
    for field in sorted((one for one in fields if "place" in one), key=lambda one: one["place"]):
        _add_by_place(parser, field, optional=command["body"] and field["in"] == "body")
    for field in fields:
        if "place" not in field:
            _add_option(parser, field)
    if command["body"]:
        parser.add_argument("--body", metavar="JSON", help="the whole body, as JSON or @file; options are added to it")
    return parser


def _add_by_place(parser: Parser, field: Json, *, optional: bool) -> None:
    """Add a positional argument. It is optional if its field may be given in --body instead."""
    many = field["type"] == "list"
    count = "*" if many else "?" if optional else None
    parser.add_argument(_dest(field), nargs=count, metavar=metavar(field), help=_help(field))


def _add_option(parser: Parser, field: Json) -> None:
    names = [f"--{field['short']}"] if "short" in field else []
    names += [field["option"]]
    if field["type"] == "boolean":
        parser.add_argument(*names, dest=_dest(field), action=argparse.BooleanOptionalAction, help=_help(field))
        return
    action = "append" if field["type"] == "list" else "store"
    parser.add_argument(*names, dest=_dest(field), action=action, metavar=metavar(field), help=_help(field))


def _dest(field: Json) -> str:
    return f"{field['in']}.{field['name']}"  # a parameter and a field of the body may have the same name


def metavar(field: Json) -> str:
    if "place" in field:
        return str(field["name"].rpartition(".")[2].upper())
    kinds = {"integer": "N", "number": "X", "list": "A,B", "json": "JSON", "secret": "FILE", "boolean": ""}
    return kinds.get(field["type"], "TEXT")


def explained(field: Json) -> str:
    """Describe an argument or option of a command, for its help and the reference: help text, choices, default, whether
    it is required."""
    parts = [field["help"].rstrip(".")] if "help" in field else []
    if not parts and field["in"] == "path":
        parts = [f"{'id' if field['name'].endswith('_id') else 'name'} of the {noun(field)}"]
    if "choices" in field:
        parts.append("one of " + ", ".join(str(one) for one in field["choices"]))
    if field["type"] == "secret":
        parts.append("read from a file, - is stdin")
    if field["type"] == "list":
        parts.append("repeatable" if "place" not in field else "several may be given")
    if "default" in field:
        parts.append(
            f"default {field['default'] if isinstance(field['default'], str) else json.dumps(field['default'])}"
        )
    if field.get("nullable"):
        parts.append("`null` clears it")
    if field.get("required") and "place" not in field:
        parts.append("required")
    return "; ".join(parts)


def typed(field: Json) -> str:
    """Return the name of an argument (`NAME`) or option (`--name`) as the user types it."""
    if "place" in field:
        return metavar(field)
    return f"--{field['short']}" if "short" in field else str(field["option"])


def as_typed(command: Json, message: str) -> str:
    """Return an error message of the server with its field names replaced by the arguments and options that the user
    types for them. In a sentence a secret is named, too: its option is a file."""
    names = {field["name"]: typed(field) for field in command["fields"]}
    secret = [field for field in command["fields"] if field["type"] == "secret"]
    in_sentence = {**names, **{field["name"]: f"{noun(field)} ({typed(field)})" for field in secret}}

    def named(found: re.Match[str]) -> str:
        name = found[2] if found[2] in names else found[2].lower()  # the client begins a sentence in upper case
        return f"{found[1]}{names[name]}: " if name in names else found[0]

    return IN_SENTENCE.sub(lambda found: in_sentence.get(found[0], found[0]), FIELD.sub(named, message))


def noun(field: Json) -> str:
    return str(field["name"].removesuffix("_id").removesuffix("_name").replace("_", " "))


def _help(field: Json) -> str:
    return explained(field).replace("%", "%%") or " "


def request_of(command: Json, given: argparse.Namespace) -> tuple[str, Json, Json | None]:
    """Return path, query and body (None if the command has none) of the request that the parsed arguments describe.
    Raise Failure if a required field of the body is missing or a value is not valid."""
    path, query, body = command["path"], {}, _whole_body(given)
    for field in command["fields"]:
        text = getattr(given, _dest(field))
        if text is None or text == []:
            continue
        value = value_of(field, text)
        if field["in"] == "path":
            path = path.replace(f"{{{field['name']}}}", quote(str(value), safe=""))
        elif field["in"] == "query":
            query[field["name"]] = value
        else:
            _put(body, field["name"].split("."), value)
    if not command["body"]:
        return path, query, None
    missing = [one for one in command["fields"] if one.get("required") and one["in"] == "body" and not _has(body, one)]
    if missing:
        names = ", ".join(typed(one) for one in missing)
        raise misused(f"missing: {names}. See `ecluse {command['name']} --help`.")
    return path, query, body


def value_of(field: Json, given: Any) -> Any:
    name = typed(field)
    if field.get("nullable") and given in ("null", ["null"]):
        return None
    if field["type"] == "list":
        return _listed(field, name, given)
    if field["type"] == "json":
        return read_json(given, name)
    if field["type"] == "secret":  # all users of the host can read command lines
        return _secret(given, name)
    return _scalar(field["type"], field.get("choices"), name, given)


def _secret(file: str, name: str) -> str:
    if not (found := read_text(file, name).strip()):
        raise misused(f"{name}: {'stdin' if file == '-' else file} is empty: it must contain the secret.")
    return found


def _listed(field: Json, name: str, given: Sequence[str]) -> list[Any]:
    if len(given) == 1 and given[0].lstrip().startswith(("[", "@")):
        found = read_json(given[0], name)
        return found if isinstance(found, list) else [found]
    words = [word.strip() for text in given for word in text.split(",") if word.strip()]
    return [_scalar(field.get("items", "string"), field.get("choices"), name, word) for word in words]


def _scalar(kind: str, choices: Sequence[Any] | None, name: str, given: Any) -> Any:
    value = given
    if kind in NUMBERS:
        try:
            value = NUMBERS[kind](given)
        except ValueError:
            raise misused(f"{name}: {given!r} is not a{'n integer' if kind == 'integer' else ' number'}.") from None
    elif kind == "word" and given.isdecimal():
        value = int(given)
    elif kind == "boolean" and isinstance(given, str):
        if given not in ("true", "false"):
            raise misused(f"{name}: {given!r} is neither true nor false.")
        value = given == "true"
    if choices and value not in choices:
        known = [str(one) for one in choices]
        raise misused(f"{name}: {given!r} is not one of {', '.join(known)}.{meant(str(given), known)}")
    return value


def read_json(text: str, name: str) -> Any:
    """Parse JSON from the text; `@file` stands for the content of a file, `@-` for stdin. Raise Failure, which names
    the option `name`, if the file cannot be read or the text is not JSON."""
    try:
        return json.loads(read_text(text[1:], name) if text.startswith("@") else text)
    except (ValueError, RecursionError) as error:
        raise misused(f"{name} is not valid JSON: {error}.") from error


def read_text(file: str, name: str) -> str:
    """Read a text file, or stdin if `file` is `-`. Raise Failure, which names the option `name`, if the file cannot be
    read or is not UTF-8."""
    try:
        return sys.stdin.read() if file == "-" else Path(file).expanduser().read_text()
    except OSError as error:
        raise misused(f"{name}: cannot read {file}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise misused(f"{name}: {file} is not UTF-8 text.") from error


def _whole_body(given: argparse.Namespace) -> Json:
    if getattr(given, "body", None) is None:
        return {}
    found = read_json(given.body, "--body")
    if not isinstance(found, dict):
        raise misused("--body must be a JSON object.")
    return found


def _put(body: Json, path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        body = body.setdefault(name, {})
    body[path[-1]] = value


def _has(body: Json, field: Json) -> bool:
    found: Any = body
    for name in field["name"].split("."):
        if not isinstance(found, dict) or name not in found:
            return False
        found = found[name]
    return True
