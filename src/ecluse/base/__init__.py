"""Helpers that every package may import: errors, time, ids, text, logging. No database, no network."""
