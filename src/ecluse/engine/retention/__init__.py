"""Deleting what is old, and erasing what must go."""
