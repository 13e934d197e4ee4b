"""Runs from start to end: rows and status, targets, outcomes, stages, items, leases, waiters, log, redrive, end."""
