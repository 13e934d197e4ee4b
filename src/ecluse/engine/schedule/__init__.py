"""Schedules, their slots, and the tick that fires them."""
