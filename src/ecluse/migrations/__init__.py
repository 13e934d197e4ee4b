"""The database schema: one Alembic tree, applied under a lock when a server starts."""
