"""Alembic's entry point. The runner passes an open connection; there is no offline mode and no ini file."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"], transaction_per_migration=True)
with context.begin_transaction():
    context.run_migrations()
