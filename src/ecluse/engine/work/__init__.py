"""The work loop of a replica: claim items, execute them, judge their results, commit in groups."""
