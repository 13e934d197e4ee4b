"""A run from its start to its end: rows, targets, stages, leases, log, end."""
