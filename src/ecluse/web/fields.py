"""Fields of a form, made from the JSON schema of a model: their names, how they are entered, and the conversion between
values and entered texts. Names are those of the model, in snake_case; `selection.days` is a field of a nested model,
`steps.0.name` a field of the first row of a list of models."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.alias_generators import to_snake

LONG = 300  # characters: a text that may be longer is entered in several lines
MOST_ROWS = 50
SPARE_ROWS, MORE_ROWS = 1, 3  # shown empty below the rows of a list; and if more are asked for
NULL = re.compile(r"\bnull\b")
MORE = "_more"  # name of the button that asks for more rows
YES, NO = "true", "false"

Schema = dict[str, Any]
Texts = Mapping[str, str]  # entered text by the name of its field


@dataclass(frozen=True)
class Field:
    name: str
    label: str
    kind: str  # text, long, number, check, choice, lines, json, date, password, group or rows
    hint: str
    required: bool
    schema: Schema
    options: Sequence[str] = ()
    fields: Sequence[Field] = ()  # of a group
    rows: Sequence[Sequence[Field]] = ()

    @property
    def id(self) -> str:
        return "field-" + self.name.replace(".", "-")

    @property
    def example(self) -> str:
        found = self.schema.get("examples") or [""]
        return found[0] if self.kind in ("text", "long") and isinstance(found[0], str) else ""

    @property
    def step(self) -> str:
        return "1" if self.schema.get("type") == "integer" else "any"


def model_of(models: Sequence[type[BaseModel]], given: Texts) -> type[BaseModel] | None:
    """Return the model of an operation's body; of alternatives, the one whose literal fields have the values in
    `given`, else the first. None if there is none."""
    fitting = (one for one in models if all(given.get(name) in values for name, values in _literals(one).items()))
    return next(fitting, models[0] if models else None)


def _literals(model: type[BaseModel]) -> dict[str, tuple[Any, ...]]:
    found = {name: one.annotation for name, one in model.model_fields.items()}
    return {name: get_args(one) for name, one in found.items() if get_origin(one) is Literal}


def in_names_of(model: type[BaseModel], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a record by the snake_case names of the model's fields; the record itself may use snake_case
    or camelCase. A field that the record lacks is None; values of the record that are not fields of the model are
    dropped. A value without declared fields, such as a JSON object, is returned unchanged."""
    schema = model.model_json_schema()
    return _named(schema, schema.get("$defs", {}), record)


def _named(schema: Schema, known: Schema, record: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, one in schema.get("properties", {}).items():
        value, (plain, _) = record.get(name, record.get(to_snake(name))), _plain(one, known)
        nested = _kind(plain) == "group" and isinstance(value, Mapping)
        found[to_snake(name)] = _named(plain, known, value) if nested else value
    return found


def never_null(model: type[BaseModel]) -> frozenset[str]:
    """Return the names of the fields of an answer, in snake_case, that always have a value."""
    schema = model.model_json_schema(mode="serialization")
    plain = {name: _plain(one, schema.get("$defs", {})) for name, one in schema.get("properties", {}).items()}
    return frozenset(to_snake(name) for name, (one, nullable) in plain.items() if not nullable and "type" in one)


def fields_of(model: type[BaseModel], current: Mapping[str, Any] | None, given: Texts) -> list[Field]:
    """Return the fields of a model, the field `name` first. A list of models has a row for each entry of `current` or
    `given` and some empty rows, MOST_ROWS in total at most."""
    schema = model.model_json_schema()
    found = _fields(schema, schema.get("$defs", {}), current or {}, given, "")
    return sorted(found, key=lambda field: field.name != "name")


def _fields(schema: Schema, known: Schema, current: Mapping[str, Any], given: Texts, before: str) -> list[Field]:
    needed = {to_snake(name) for name in schema.get("required", ())}
    return [
        _field(one, known, current.get(to_snake(name)), given, before + to_snake(name), to_snake(name) in needed)
        for name, one in schema.get("properties", {}).items()
    ]


def _field(schema: Schema, known: Schema, current: Any, given: Texts, name: str, required: bool) -> Field:
    plain, nullable = _plain(schema, known)
    kind, fields, rows, options = _kind(plain), [], [], [str(one) for one in plain.get("enum", ())]
    if kind == "check" and nullable and not isinstance(current, bool):
        kind, options = "choice", [YES, NO]
    if kind == "group":
        inner = current if isinstance(current, Mapping) else {}
        fields = _fields(plain, known, inner, given, f"{name}.")
    elif kind == "rows":
        now: list[Any] = current if isinstance(current, list) else []
        item, _ = _plain(plain["items"], known)
        filled = [int(one.split(".")[0]) for one in _below(given, name) if one.split(".")[0].isdigit()]
        spare = MORE_ROWS if given.get(MORE) == name else SPARE_ROWS
        count = min(MOST_ROWS, max([len(now), *(n + 1 for n in filled)]) + spare)
        rows = [_fields(item, known, now[n] if n < len(now) else {}, given, f"{name}.{n}.") for n in range(count)]
    label = name.rpartition(".")[2].replace("_", " ").capitalize()
    hint = schema.get("description") or ("" if kind == "group" else plain.get("description", ""))
    hint = NULL.sub("empty", hint)  # descriptions speak of JSON
    return Field(name, label, kind, hint[:1].upper() + hint[1:], required, plain, options, fields, rows)


def _plain(schema: Schema, known: Schema) -> tuple[Schema, bool]:
    """Return the schema with references resolved and alternatives reduced to the first one that is not null, and
    whether null is allowed."""
    nullable = False
    while "$ref" in schema or "anyOf" in schema or "allOf" in schema:
        outer = {name: value for name, value in schema.items() if name not in ("$ref", "anyOf", "allOf")}
        if "$ref" in schema:
            inner = known[schema["$ref"].rpartition("/")[2]]
        else:
            choices = schema.get("anyOf") or schema["allOf"]
            nullable = nullable or any(one.get("type") == "null" for one in choices)
            inner = next(one for one in choices if one.get("type") != "null")
        schema = {**inner, **outer}
    if "const" in schema:
        schema = {**schema, "enum": [schema["const"]]}
    return schema, nullable


def _kind(schema: Schema) -> str:
    if "enum" in schema:
        return "choice"
    match schema.get("type"):
        case "boolean":
            return "check"
        case "integer" | "number":
            return "number"
        case "object":
            return "group" if schema.get("properties") else "json"
        case "array":
            items = schema.get("items", {})
            return "rows" if "$ref" in items or items.get("type") == "object" else "lines"
        case "string":
            if schema.get("format") in ("date", "password"):
                return str(schema["format"])
            return "long" if schema.get("maxLength", 0) > LONG else "text"
    return "json"


def texts_of(fields: Sequence[Field], current: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the initial texts of a form by field name: the values of the record `current`, or the defaults for a new
    record (None). Empty fields are left out."""
    found: dict[str, str] = {}
    for field in fields:
        value = None if current is None else current.get(_last(field.name))
        if current is None and value is None:
            value = field.schema.get("default")
        if field.kind == "group":
            found |= texts_of(field.fields, None if current is None else value or {})
        elif field.kind == "rows":
            for n, row in enumerate(field.rows):
                found |= texts_of(row, value[n]) if value and n < len(value) else {}
        elif value is not None:
            found[field.name] = _text(field, value)
    return found


def _text(field: Field, value: Any) -> str:
    match field.kind:
        case "check" | "choice" if isinstance(value, bool):
            return YES if value else NO
        case "lines":
            return "\n".join(str(one) for one in value)
        case "json":
            return json.dumps(value, indent=2, ensure_ascii=False)
    return str(value)


def values_of(fields: Sequence[Field], given: Texts, current: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the entered values by field name. An empty field is left out or, if the record `current` has a value
    there, cleared. Invalid texts are returned unchanged, for the model to refuse."""
    found: dict[str, Any] = {}
    for field in fields:
        name, before = _last(field.name), None if current is None else current.get(_last(field.name))
        if field.kind == "group":
            inner = values_of(field.fields, given, before if isinstance(before, Mapping) else None)
            if inner or field.required:
                found[name] = inner
        elif field.kind == "rows":
            rows = [values_of(row, given, None) for row in field.rows if any(given.get(one.name) for one in row)]
            if rows or before:
                found[name] = rows
        elif field.kind == "check":
            found[name] = given.get(field.name) == YES
        elif text := given.get(field.name, "").strip():
            found[name] = _value(field, text)
        elif before not in (None, "", []):
            found[name] = _empty(field)
    return found


def _empty(field: Field) -> Any:
    if field.kind == "lines":
        return []
    return "" if field.kind in ("text", "long") and not field.schema.get("minLength") else None


def changes(entered: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entered values that differ from the record's current ones; an empty value equals a missing one."""
    return {name: value for name, value in entered.items() if _bare(value) != _bare(current.get(name))}


def _value(field: Field, text: str) -> Any:
    """Convert an entered text to the value of its field; an invalid text is returned unchanged, for the model to
    refuse."""
    match field.kind:
        case "number":
            return _number(text)
        case "choice":
            known = {str(one): one for one in field.schema.get("enum", ())} or {YES: True, NO: False}
            return known.get(text, text)
        case "lines":
            entries = [one.strip() for one in re.split(r"[\n,]", text) if one.strip()]
            whole = field.schema.get("items", {}).get("type") in ("integer", "number")
            return [_number(one) for one in entries] if whole else entries
        case "json":
            try:
                return json.loads(text)
            except ValueError:
                return text
    return text


def _number(text: str) -> Any:
    if re.fullmatch(r"-?[0-9]{1,18}", text):
        return int(text)
    return float(text) if re.fullmatch(r"-?[0-9]{1,18}\.[0-9]{1,18}", text) else text


def _bare(value: Any) -> Any:
    """Return the value without its empty fields, so that an empty field equals a missing one."""
    match value:
        case Mapping():
            return {name: _bare(one) for name, one in value.items() if one not in (None, "", [], {})} or None
        case list():
            return [_bare(one) for one in value] or None
        case "":
            return None
    return value


def _below(given: Texts, name: str) -> list[str]:
    return [one.removeprefix(f"{name}.") for one, text in given.items() if one.startswith(f"{name}.") and text.strip()]


def _last(name: str) -> str:
    return name.rpartition(".")[2]
