"""Lanes to vendors: their rows and registry, caps set by operators, rates in force, breaker counts, permits, pauses.
(`work/claim.py` enforces the caps.)"""
