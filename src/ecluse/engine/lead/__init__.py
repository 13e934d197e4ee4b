"""Leading a run: its story, the gates at which it waits, and the durable workflow that runs the story."""
