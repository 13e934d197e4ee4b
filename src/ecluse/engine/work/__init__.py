"""One claimed item after the other: claim, execute, decide, commit."""
