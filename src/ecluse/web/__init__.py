"""The pages for operators: rendered on the server, kept up to date by server-sent events, the same for every flow. A
visitor uses an API key, sent in a cookie; pages read the database as the API does, and act through its operations."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, FastAPI

from ecluse.web import (
    audits,
    companies,
    confirm,
    connections,
    forms,
    job_schedules,
    jobs,
    lanes,
    login,
    pricing,
    reference,
    runs,
    schedules,
    shops,
    targets,
)
from ecluse.web.live import Pace, RenderingTurns

# In this order: the last one has a route that matches every remaining path.
PARTS = (
    *(runs, targets, schedules, lanes, connections, audits, shops, pricing, job_schedules, jobs, companies),
    *(forms, reference, confirm, login),
)


def mount(app: FastAPI, others: Sequence[APIRouter] = ()) -> None:
    """Add the routes of the pages to the application. `others`: routes of other packages, added before them, because
    the last page matches every remaining path."""
    app.state.page_pace, app.state.page_turns = Pace(), RenderingTurns()
    for routes in (*others, *(part.routes for part in PARTS)):
        app.router.routes += routes.routes
