"""The work loop of a replica: claim items (order, fair shares, caps), execute them, judge their results, commit in
groups, end complete stages and runs."""
