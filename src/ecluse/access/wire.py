"""Types of query parameters, bodies and answers: 64-bit ids as strings, pages of 50 (at most 200), numbers in plain
digits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel
from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import HTTPConnection

from ecluse.base.errors import NotFound
from ecluse.base.text import LONGEST_KEY, storable
from ecluse.db.query import Row
from ecluse.db.reads import Reads
from ecluse.db.shares import Writes
from ecluse.engine.kit import Kit

LARGEST_ID = 2**63 - 1


def _plain(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch(r"0|[1-9][0-9]{0,18}", value):
        raise ValueError("must be a whole number in plain digits")
    return value


def _storable(value: str) -> str:
    if "\x00" in value:
        raise ValueError("must be text without NUL bytes")
    return value


Limit = Annotated[
    int, Query(ge=1, le=200, description="Maximum number of rows in the answer."), BeforeValidator(_plain)
]
Offset = Annotated[int, Query(ge=0, le=1_000_000, description="Number of rows to skip."), BeforeValidator(_plain)]
Order = Annotated[Literal["asc", "desc"], Query(description="`asc`: the oldest first; `desc`: the newest first.")]
Instant = Annotated[
    datetime | None,
    Query(description="ISO 8601; without an offset it is UTC.", examples=["2026-03-01T08:00:00Z"]),
    AfterValidator(lambda at: at if at is None or at.tzinfo else at.replace(tzinfo=UTC)),
]
IdFilter = Annotated[str | None, Query(pattern=r"^[1-9][0-9]{0,17}$", examples=["7"])]
TargetFilter = Annotated[
    str | None, Query(max_length=LONGEST_KEY), AfterValidator(lambda value: value and _storable(value))
]
Filter = Annotated[str | None, Query(max_length=200), AfterValidator(lambda value: value and _storable(value))]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    def changes(self, *nullable: str, **dumped: Any) -> Row:
        """Return the fields that a request for a change gives. Null means no change, but it clears the `nullable`."""
        given = self.model_dump(exclude_unset=True, **dumped)
        return {name: value for name, value in given.items() if value is not None or name in nullable}


class CamelBody(Body):
    """Base of bodies whose fields are accepted in camelCase only."""

    model_config = ConfigDict(alias_generator=to_camel)


class Shape(BaseModel):
    """Base of the models that describe answers in the OpenAPI document. Answers are not built from these models; tests
    compare the two."""

    model_config = ConfigDict(extra="forbid")


class CamelShape(Shape):
    """Base of answers whose fields are spelled in camelCase; columns have the names of the fields in snake_case."""

    model_config = ConfigDict(alias_generator=to_camel)


def camel(row: Row) -> Row:
    """Return the row with the names of its columns in camelCase."""
    return {to_camel(name): value for name, value in row.items()}


class Page(Shape):
    limit: int
    offset: int


class WillFail(Shape):
    count: int = Field(description="Targets without an outcome that are known to fail.")
    codes: dict[str, int] = Field(examples=[{"NO_URL": 2}])


class OutcomeCounts(Shape):
    selected: int
    successful: int
    failed: int
    ignored: int
    cancelled: int = Field(description="The part of `failed` that the cancelled run never finished.")


class StageRow(Shape):
    stage: str
    expected: int
    done: int
    failed: int
    ignored: int
    unfinished: int = Field(description="Items that were open when the run ended.")
    in_flight: int
    waiting: int
    round: int
    started_at: datetime
    fanned_out_at: datetime | None
    progress_at: datetime
    deadline_at: datetime
    ended_at: datetime | None
    end_cause: Literal["done", "timeout", "run ended"] | None


class Deleted(Shape):
    id: str = Field(examples=["7"])
    deleted: Literal[True]


class Fire(Shape):
    at: datetime
    mark: str | None = Field(description="Note if a clock change or the execution window moves it.")


class SlotRow(Shape):
    due_at: datetime
    state: Literal["fired", "waiting", "skipped", "missed", "failed"]
    reason: str | None
    run_id: str | None = Field(examples=["7"])
    reference: str | None = Field(description="What was made for it instead of a run, such as a job.")
    decided_at: datetime


def number(noun: str, text: str) -> int:
    """Return the id in a path parameter. Raise NotFound for text that cannot be an id, as for an id that does not
    exist; `noun` names the record in the message."""
    if re.fullmatch(r"[1-9][0-9]{0,18}", text) and int(text) <= LARGEST_ID:
        return int(text)
    raise NotFound(f"There is no {noun} {storable(text, 50)}.")


class TextConvertor(Convertor[str]):
    """`{name:text}` in the path of a read: matches any text, including slashes and line breaks. Not for writes, where a
    slash may be a path separator: `POST …/7/status` must not queue a fiche `7/status`."""

    regex = r"[\s\S]+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("text", TextConvertor())


def with_ids_as_text(rows: Sequence[Row]) -> Sequence[Row]:
    """Convert the ids in the rows (`id`, `redrive_of`, `…_id`) to strings, in place, and return the rows."""
    for row in rows:
        for name, value in row.items():
            if isinstance(value, int) and (name in ("id", "redrive_of") or name.endswith("_id")):
                row[name] = str(value)
    return rows


def id_as_text(row: Row) -> Row:
    with_ids_as_text([row])
    return row


def kit_of(request: Request) -> Kit:
    kit: Kit = request.app.state.kit
    return kit


def reads_of(request: Request) -> Reads:
    """Return the reads of the caller's tenant, which are limited to its share. Requests without a key have one share
    together."""
    reads: Reads = request.app.state.reads
    caller = getattr(request.state, "caller", None)
    return reads.of("" if caller is None else caller.tenant)


def writes_of(request: HTTPConnection) -> Writes:
    writes: Writes = request.app.state.writes
    return writes
