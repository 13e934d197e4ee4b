"""Queued runs are found by tenant, so that workers take them from the tenants in turn. The index has no column that
changes while a run is open, and leaves out the many runs that are only items."""

from __future__ import annotations

from ecluse.migrations.online import build_indexes

revision = "0048"
down_revision = "0047"


def upgrade() -> None:
    build_indexes({"runs_to_lead": "runs (tenant_id, id) WHERE orchestrated AND ended_at IS NULL"})
