"""Leading a run: its story, the gates where it waits, the durable workflow under it."""
