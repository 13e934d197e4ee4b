"""Leading a run: its story, the gates it waits at, the durable workflow under it."""
