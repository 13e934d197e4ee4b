"""Lanes to vendors: caps, rates, holds, breakers, pauses."""
