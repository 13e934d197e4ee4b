"""Ecluse: periodic work over records held in other people's systems, with one truthful outcome per record."""
