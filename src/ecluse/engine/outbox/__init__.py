"""Events that are written with the fact they announce, and their publisher."""
