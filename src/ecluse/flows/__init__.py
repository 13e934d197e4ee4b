"""The built-in flows, each in a package of its own, on top of the engine."""
