"""Ecluse measured beside its peers on one Postgres. Run it with `python -m bench`."""
