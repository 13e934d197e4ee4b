"""Lanes to vendors: their registry, caps set by operators, breaker counts, pauses. (`work/claim.py` enforces the
caps.)"""
