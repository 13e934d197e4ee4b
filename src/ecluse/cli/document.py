"""Commands made from the OpenAPI document of a server. An operation with `x-command` is a command; its parameters and
the fields of its body become arguments and options.

`commands_of` returns them in the compact form that is packaged as commands.json (`make docs`). It is also used at run
time, on the document of a server that offers more commands.
"""

from __future__ import annotations

import re
from typing import Any

Json = dict[str, Any]
DEEPEST = 4  # levels of nested objects that become options; below, an object is given as JSON
SCALARS = ("string", "integer", "number", "boolean")  # besides: `word` is an integer or text, `secret` from a file


def commands_of(document: Json) -> list[Json]:
    by_id = {
        operation["operationId"]: (path, operation)
        for path, methods in document["paths"].items()
        for operation in methods.values()
        if isinstance(operation, dict) and "operationId" in operation
    }
    found = [
        _command(_Schemas(document), by_id, path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if isinstance(operation, dict) and "x-command" in operation
    ]
    return sorted(found, key=lambda one: one["name"])


class _Schemas:
    def __init__(self, document: Json) -> None:
        self._known = document.get("components", {}).get("schemas", {})

    def resolved(self, schema: Json) -> tuple[Json, bool]:
        """Return the schema with references resolved and alternatives reduced to one (`_either`), and whether null is
        allowed."""
        if "$ref" in schema:
            beside = {name: value for name, value in schema.items() if name != "$ref"}
            return self.resolved({**self._known[schema["$ref"].rpartition("/")[2]], **beside})
        if len(schema.get("allOf", ())) == 1:
            beside = {name: value for name, value in schema.items() if name != "allOf"}
            return self.resolved({**schema["allOf"][0], **beside})
        options = schema.get("anyOf") or schema.get("oneOf")
        if not options:
            return schema, schema.get("type") == "null"
        beside = {name: value for name, value in schema.items() if name not in ("anyOf", "oneOf")}
        kinds = [self.resolved(one) for one in options]
        nullable = any(null for _, null in kinds)
        rest = [one for one, _ in kinds if one.get("type") != "null"]
        return {**_either(rest), **beside}, nullable


def _either(kinds: list[Json]) -> Json:
    """Reduce alternative schemas to one: objects and choices are merged, integer or text becomes `word`, a list is
    preferred to a text. Other alternatives become `{}`, any JSON value."""
    if len(kinds) == 1:
        return kinds[0]
    if all(one.get("type") == "object" for one in kinds):
        return _merged(kinds)
    if all("enum" in one or "const" in one for one in kinds):
        return {"type": kinds[0].get("type", "string"), "enum": [value for one in kinds for value in _choices(one)]}
    if {one.get("type") for one in kinds} == {"integer", "string"}:
        return {"type": "word"}
    for wanted in ("array", "string"):
        if chosen := next((one for one in kinds if one.get("type") == wanted), None):
            return {"type": wanted, **({"items": chosen.get("items", {})} if wanted == "array" else {})}
    return {}


def _merged(kinds: list[Json]) -> Json:
    properties: Json = {}
    for one in kinds:
        for name, schema in one.get("properties", {}).items():
            known = properties.get(name)
            if known is not None and _choices(known) and _choices(schema):
                values = [*_choices(known), *(v for v in _choices(schema) if v not in _choices(known))]
                properties[name] = {"type": "string", "enum": values, "description": known.get("description", "")}
            else:
                properties.setdefault(name, schema)
    required = set.intersection(*(set(one.get("required", ())) for one in kinds))
    return {"type": "object", "properties": properties, "required": sorted(required)}


def _choices(schema: Json) -> list[Any]:
    return [schema["const"]] if "const" in schema else list(schema.get("enum", ()))


def _command(schemas: _Schemas, by_id: dict[str, tuple[str, Json]], path: str, method: str, operation: Json) -> Json:
    declared = operation["x-command"]
    arguments = declared.get("arguments", [])
    short = {field: name for name, field in declared.get("options", {}).items()}
    fields = []
    for one in operation.get("parameters", ()):
        if one["in"] in ("path", "query"):
            schema = {**one["schema"], "description": one.get("description", one["schema"].get("description", ""))}
            fields.append(_field(schemas, one["name"], schema, one["in"], one.get("required", False)))
    body = operation.get("requestBody")
    if body is not None:
        content = next(iter(body["content"].values()))
        fields += _fields(schemas, "", content["schema"], body.get("required", False), DEEPEST)
    if method not in ("patch", "put"):  # a new record has nothing to clear
        fields = [{**one, "nullable": False} for one in fields]
    by_place = [*(("path", name) for name in re.findall(r"{(\w+)", path)), *(("body", name) for name in arguments)]
    for field in fields:
        if (field["in"], field["name"]) in by_place:
            field["place"] = 1 + by_place.index((field["in"], field["name"]))
        if field["name"] in short:
            field["short"] = short[field["name"]]
    found = {
        "name": declared["name"],
        "help": operation.get("description", ""),
        "method": method.upper(),
        "path": path,
        "body": body is not None,
        "fields": [{name: value for name, value in one.items() if value not in ("", None, False)} for one in fields],
        **_answer(schemas, operation, declared),
        **{
            name: declared[name].removeprefix("ecluse ")
            for name in ("follows", "empty", "text", "example")
            if name in declared
        },
    }
    if "hides" in declared:
        found["hides"] = declared["hides"]
    if "result" in declared:
        found["result"] = {**declared["result"], "read": by_id[declared["result"]["read"]][0]}
    if "preview" in declared:
        at, read = by_id[declared["preview"]]
        given = [one["name"] for one in read.get("parameters", ()) if one["in"] == "query"]
        found["preview"] = {"path": at, "query": given}
    return found


def _answer(schemas: _Schemas, operation: Json, declared: Json) -> Json:
    """Return `list`, the name of the list in the operation's answer, and `columns`, those to show: the declared ones,
    or all single values of a row. Empty if the answer is not a list of rows."""
    good: Json = next((one for code, one in sorted(operation["responses"].items()) if code.startswith("2")), {})
    content: Json = next(iter(good.get("content", {}).values()), {})
    schema, _ = schemas.resolved(content.get("schema", {}))
    columns = list(declared.get("columns", ()))
    properties = {name: schemas.resolved(one)[0] for name, one in schema.get("properties", {}).items()}
    lists = [name for name, one in properties.items() if one.get("type") == "array"]
    if len(lists) > 1:  # beside lists of words
        lists = [name for name in lists if "properties" in schemas.resolved(properties[name].get("items", {}))[0]]
    if len(lists) != 1 or not ("limit" in properties or len(properties) == 1):
        return {}
    row, _ = schemas.resolved(properties[lists[0]].get("items", {}))
    if "properties" not in row:
        return {}
    kinds = {name: schemas.resolved(one)[0].get("type") for name, one in row.get("properties", {}).items()}
    plain = [name for name, kind in kinds.items() if kind not in ("object", "array") and name != "tenant_id"]
    return {"list": lists[0], "columns": columns or plain}


def _fields(schemas: _Schemas, path: str, schema: Json, required: bool, depth: int) -> list[Json]:
    """Return the fields of an object as a flat list, each followed by the fields of the object nested in it, down to
    `depth` levels. Fields of nested objects are never required here: the server checks them."""
    found, _ = schemas.resolved(schema)
    fields = []
    for name, one in found.get("properties", {}).items():
        where, inner = f"{path}.{name}" if path else name, schemas.resolved(one)[0]
        needed = required and name in found.get("required", ())
        nested = inner.get("type") == "object" and inner.get("properties") and depth > 0
        fields.append(_field(schemas, where, one, "body", needed and not nested))
        if nested:  # required fields within it may follow from others: that is left to the server
            fields += _fields(schemas, where, one, False, depth - 1)
    return fields


def _field(schemas: _Schemas, name: str, schema: Json, place: str, required: bool) -> Json:
    found, nullable = schemas.resolved(schema)
    kind, items = found.get("type"), None
    if kind == "array":
        items = schemas.resolved(found.get("items", {}))[0]
        kind = "list" if items.get("type") in SCALARS else "json"
    if found.get("writeOnly") and kind == "string":
        kind = "secret"
    default = found.get("default")
    option = re.sub(r"(?<=[a-z0-9])([A-Z])", r"-\1", name).lower().replace("_", "-").replace(".", "-")
    return {
        "name": name,
        "in": place,
        "option": f"--{option}-file" if kind == "secret" else f"--{option}",
        "type": kind if kind in (*SCALARS, "word", "secret", "list") else "json",
        "items": items.get("type") if items is not None and kind == "list" else None,
        "choices": _choices(items if items is not None else found) or None,
        "default": None if default == [] or default == {} else default,
        "help": found.get("description", "").strip(),
        "required": required,
        "nullable": nullable and place == "body",
    }
