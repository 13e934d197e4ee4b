"""Reference pages for programmers, served without a key like the OpenAPI document: `/docs`, where operations can be
tried out, and `/docs/errors`, with every error code."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from ecluse.access.envelope import EXPLAINED
from ecluse.access.error_codes import REFUSALS
from ecluse.insight.outcome_codes import FAILURES
from ecluse.web import render
from ecluse.web.authentication import Page

routes = APIRouter(route_class=Page, include_in_schema=False)


@routes.get("/docs")
async def show_reference(request: Request) -> Response:
    return render.page(request, "reference.html")


@routes.get(EXPLAINED)
async def show_error_codes(request: Request) -> Response:
    refusals, failures = sorted(REFUSALS.items()), sorted(FAILURES.items())
    return render.page(request, "error_codes.html", refusals=refusals, failures=failures)
