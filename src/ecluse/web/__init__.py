"""The pages: what an operator looks at in a browser. Rendered here, read-only, live by server-sent events, and the same
for every flow. Whoever comes shows the same key as at the API, from a cookie; what is read is read as the API reads it.
"""

from __future__ import annotations

from fastapi import FastAPI

from ecluse.web import entrance, runs, schedules

# In this order: the last of them takes every path that is left.
PARTS = (runs, schedules, entrance)


def mount(app: FastAPI) -> None:
    for part in PARTS:
        app.router.routes += part.routes.routes
