"""Helpers that every package may import: errors, time and randomness, ids, logging. No database, no network."""
