"""Runs from start to end: rows, targets, stages, leases, log, finalize."""
