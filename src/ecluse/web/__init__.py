"""Web pages for operators, rendered on the server and kept up to date by server-sent events. A visitor logs in with an
API key, which the browser then sends in a cookie. Pages show the data of the key's tenant; forms act through the
operations of the API."""

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
    notifications,
    pricing,
    reference,
    runs,
    schedules,
    shops,
    targets,
)
from ecluse.web.live import Pace, RenderingTurns

# In this order: the last module, login, has a route that matches every remaining path below /ui.
PARTS = (
    *(
        runs,
        targets,
        schedules,
        lanes,
        connections,
        notifications,
        audits,
        shops,
        pricing,
        job_schedules,
        jobs,
        companies,
    ),
    *(forms, reference, confirm, login),
)


def mount(app: FastAPI, others: Sequence[APIRouter] = ()) -> None:
    """Add the routes of all pages, and the state that their streams share, to the application. `others`: page routes of
    other packages, added first, because the last route of this package matches every remaining path below /ui."""
    app.state.page_pace, app.state.page_turns = Pace(), RenderingTurns()
    for routes in (*others, *(part.routes for part in PARTS)):
        app.router.routes += routes.routes
