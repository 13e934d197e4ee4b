"""The pages for operators: rendered on the server, read-only, kept up to date by server-sent events, and the same for
every flow. A visitor uses an API key, sent in a cookie; pages read the database as the API does."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, FastAPI

from ecluse.web import entrance, runs, schedules
from ecluse.web.live import Pace

# In this order: the last one has a route that matches every remaining path.
PARTS = (runs, schedules, entrance)


def mount(app: FastAPI, others: Sequence[APIRouter] = ()) -> None:
    """Add the pages, those of other packages before the last part."""
    app.state.page_pace = Pace()
    for routes in (*others, *(part.routes for part in PARTS)):
        app.router.routes += routes.routes
