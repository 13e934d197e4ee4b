"""The OpenAPI document. FastAPI describes the requests and the successful answers; this module adds the errors of each
operation, which follow from its route and its declaration. Client generators read the document: names are unique and
readable, and every status has a schema."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic.alias_generators import to_pascal

from ecluse.access.door import REFUSES, Guarded, refusals
from ecluse.access.envelope import EXPLAINED, JSON, PROBLEM, Problem, as_bytes
from ecluse.access.error_codes import REFUSALS
from ecluse.access.idempotency import REFUSES as OF_IDEMPOTENCY

SCHEMAS = "#/components/schemas/"
ABOUT = f"""\
The HTTP API of Ecluse.

- **Keys**: send `Authorization: Bearer ecl_…`. Each operation names the permission it needs (`x-permission`). An admin
  key of the tenant `default` may name another tenant with the header `Ecluse-Tenant`; one that is disabled it may read,
  but not change.
- **Errors** are `{{"error": {{"code", "message", "details", "request_id"}}}}`, or problem details (RFC 9457) if the
  Accept header names `{PROBLEM}`. [Every code]({EXPLAINED}) has a meaning and a remedy.
- **Lists** are pages of 50, at most 200 (`limit`). `next_cursor` of a page is the `cursor` of the next one.
- **Repetitions**: with an `Idempotency-Key` a request that is repeated within a day gets the answer of the first one.
- **Ids** are strings.
"""
IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "Names this request: repeated within a day, it gets the first answer and changes nothing.",
    "schema": {"type": "string", "pattern": "^[!-~]{1,200}$"},
}


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document of the app."""
    # One schema per model: a client would otherwise get two classes, for what is sent and for what is answered.
    document = get_openapi(
        title=app.title,
        version=app.version,
        description=ABOUT,
        routes=app.routes,
        separate_input_output_schemas=False,
    )
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for route in app.routes:
        if isinstance(route, Guarded):
            for method in route.methods or ():
                _complete(document["paths"][route.path_format][method.lower()], refusals(route))
    shape = Problem.model_json_schema(ref_template=SCHEMAS + "{model}")
    document["components"]["schemas"] |= {**shape.pop("$defs"), Problem.__name__: shape}
    _name_forms(document)
    return document


def _described(name: str, tag: str) -> str:
    if name == "name":
        return f"Name of the {tag.removesuffix('s')}."
    return f"Id of the {name.removesuffix('_id').replace('_', ' ')}."


def _complete(operation: dict[str, Any], codes: list[str]) -> None:
    """Add the errors with these codes, the header Idempotency-Key and missing descriptions to an operation, in
    place."""
    operation.pop(REFUSES)
    if set(OF_IDEMPOTENCY) <= set(codes):
        operation.setdefault("parameters", []).append(IDEMPOTENCY_KEY)
    for parameter in operation.get("parameters", []):
        if parameter["in"] == "path":
            parameter.setdefault("description", _described(parameter["name"], operation["tags"][0]))
    by_status: dict[int, list[str]] = {}
    for code in codes:
        by_status.setdefault(REFUSALS[code].status, []).append(code)
    for status, its in sorted(by_status.items()):
        operation["responses"][str(status)] = {
            "description": "\n".join(f"- `{code}`: {REFUSALS[code].meaning}" for code in its),
            "content": {
                JSON: {"schema": {"$ref": SCHEMAS + "ErrorAnswer"}},
                PROBLEM: {"schema": {"$ref": SCHEMAS + Problem.__name__}},
            },
            "x-codes": its,
        }


def _name_forms(document: dict[str, Any]) -> None:
    """Rename, in place, the schemas that FastAPI makes of forms, such as `Body_authorise` to `AuthoriseForm`."""
    schemas = document["components"]["schemas"]
    named = {name: f"{to_pascal(name.removeprefix('Body_'))}Form" for name in schemas if name.startswith("Body_")}
    for old, new in named.items():
        schemas[new] = schemas.pop(old) | {"title": new}
    for operation in (one for methods in document["paths"].values() for one in methods.values()):
        for content in operation.get("requestBody", {}).get("content", {}).values():
            old = content["schema"].get("$ref", "").removeprefix(SCHEMAS)
            if old in named:
                content["schema"]["$ref"] = SCHEMAS + named[old]


class Document:
    """The OpenAPI document of an app as bytes. It is a megabyte, and needs no key: it is made and compressed once, in a
    thread."""

    def __init__(self, app: FastAPI) -> None:
        self._app, self._making = app, asyncio.Lock()
        self._plain = self._packed = b""

    async def send(self, request: Request) -> Response:
        async with self._making:
            if not self._packed:
                await asyncio.to_thread(self._make)
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(self._plain, headers={"Vary": "Accept-Encoding"}, media_type=JSON)
        headers = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
        return Response(self._packed, headers=headers, media_type=JSON)

    def _make(self) -> None:
        self._plain = as_bytes(self._app.openapi())
        self._packed = gzip.compress(self._plain, 6)
