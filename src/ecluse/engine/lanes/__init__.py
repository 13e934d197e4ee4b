"""Lanes to vendors: caps, rates, holds, breakers and pauses."""
