"""Lanes to vendors: their registry, the counts of their breakers, pauses. (`work/claim.py` decides by their caps.)"""
