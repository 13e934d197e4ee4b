"""Automation: schedules select fiches, have them fetched, transcribed and audited, and record the outcome of each."""
