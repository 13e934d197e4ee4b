"""The pages for operators: rendered on the server, read-only, kept up to date by server-sent events, and the same for
every flow. A visitor uses an API key, sent in a cookie; pages read the database as the API does."""

from __future__ import annotations

from fastapi import FastAPI

from ecluse.web import entrance, reference, runs, schedules
from ecluse.web.live import Pace

# In this order: the last one has a route that matches every remaining path.
PARTS = (runs, schedules, reference, entrance)


def mount(app: FastAPI) -> None:
    app.state.page_pace = Pace()
    for part in PARTS:
        app.router.routes += part.routes.routes
