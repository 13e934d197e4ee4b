"""Benchmarks of Ecluse and its peers on one Postgres. Run them with `python -m bench`."""
