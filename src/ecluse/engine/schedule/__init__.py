"""Schedules, their due instants, and the tick that fires them."""
