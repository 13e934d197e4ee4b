"""Adapters of other people's systems: each call returns a typed answer or raises a `VendorError`, never a status code.
They know nothing of the engine or the database."""
