"""Automation: schedules that pick fiches, have them fetched, transcribed and audited, and account for each of them."""
