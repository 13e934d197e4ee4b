"""Adapters of external systems: each call returns a typed answer or raises a `VendorError`, never a status code. They
do not import the engine or the database."""
