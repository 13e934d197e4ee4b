"""The schema: one Alembic tree, applied under a lock when a program starts."""
