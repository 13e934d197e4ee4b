"""A package as others bring one: a flow, knobs, routes, a migration, a metric, an invariant, a check and a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fastapi import APIRouter, Request, Response
from pydantic_settings import BaseSettings

from ecluse.flow import (
    Act,
    Body,
    Command,
    Connection,
    Finding,
    Gauge,
    Invariant,
    Listing,
    Package,
    Row,
    Shape,
    Surface,
    fetch_all,
    fetch_value,
)
from tests.support.engine_flows import flow, stage

surface = Surface("notes", area="notes")
pages = APIRouter(include_in_schema=False)


class Knobs(BaseSettings):
    NOTES_FLOW: str = "notes"


class NewNote(Body):
    text: str


class NoteRow(Shape):
    id: str
    tenant_id: str
    text: str


surface.listing(
    "/api/notes",
    Listing("notes", NoteRow, "notes", "notes.read"),
    list_notes="List the notes, the newest first.",
    command=Command("notes list"),
)


@surface.operation(
    "POST",
    "/api/notes",
    needs="notes.write",
    answer=NoteRow,
    status=201,
    action="note.create",
    subject="note:{id}",
    command=Command("notes create", arguments=("text",)),
)
async def create_note(act: Act, body: NewNote) -> Row:
    """Write a note."""
    insert = "INSERT INTO notes (tenant_id, text) VALUES (%s, %s) RETURNING id, tenant_id, text"
    (row,) = await fetch_all(act.connection, dict, insert, (act.tenant, body.text))
    return row


@pages.get("/ui/notes")
async def show_notes(request: Request) -> Response:
    return Response("notes of a package")


async def look(connection: Connection) -> Sequence[Finding]:
    count = await fetch_value(connection, "SELECT count(*) FROM notes")
    return [Finding("ok", "notes", f"{count} notes")]


PACKAGE = Package(
    "notes",
    flows=lambda knobs: [flow(stage(), name=knobs.NOTES_FLOW)],
    knobs=Knobs,
    surface=surface,
    migrations=Path(__file__).parent / "migrations",
    gauges=[Gauge("notes", "Notes by tenant.", "SELECT ARRAY[tenant_id], count(*) FROM notes GROUP BY 1", ["tenant"])],
    invariants=[
        Invariant(
            "N-1",
            "SELECT count(*) AS n FROM notes",
            ("SELECT 'note ' || id AS subject, 'is empty' AS message FROM notes WHERE text = ''",),
        )
    ],
    doctor=look,
    pages=pages,
)
