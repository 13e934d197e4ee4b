"""Alembic's entry point. The runner passes an open connection; there is no offline mode and no ini file."""

from __future__ import annotations

from alembic import context

given = context.config.attributes
context.configure(
    connection=given["connection"],
    version_table=given.get("version_table", "alembic_version"),
    transaction_per_migration=True,
)
with context.begin_transaction():
    context.run_migrations()
