"""The row and the filters of lists of alerts. Each flow with alerts adds the id of the record that they are about."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import Field

from ecluse.access.listing import Filters, Where
from ecluse.access.wire import Shape
from ecluse.engine.model.alerts import Severity


class AlertRow(Shape):
    id: str = Field(examples=["3"])
    tenant_id: str = Field(examples=["default"])
    alert: str = Field(examples=["DLQ Backlog"])
    severity: Severity
    summary: str
    action: str = Field(description="What to do.")
    raised_at: datetime
    cleared_at: datetime | None = Field(description="Null while it is open.")


class AlertFilters(Filters):
    severity: Severity | None = None
    open: Annotated[bool | None, Where("(t.cleared_at IS NULL) = %(open)s")] = None
