"""The pages for operators: rendered on the server, kept up to date by server-sent events, the same for every flow. A
visitor uses an API key, sent in a cookie; pages read the database as the API does, and act through its operations."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, FastAPI

from ecluse.web import audits, connections, entrance, forms, lanes, reference, runs, schedules, targets
from ecluse.web.live import Pace

# In this order: the last one has a route that matches every remaining path.
PARTS = (runs, targets, schedules, lanes, connections, audits, forms, reference, entrance)


def mount(app: FastAPI, others: Sequence[APIRouter] = ()) -> None:
    """Add the pages, those of other packages before the last part."""
    app.state.page_pace = Pace()
    for routes in (*others, *(part.routes for part in PARTS)):
        app.router.routes += routes.routes
