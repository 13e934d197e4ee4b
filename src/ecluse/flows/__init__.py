"""The flows in the box: each in a room of its own, on top of the kit."""
