"""The read side of runs: lists, details, previews, and why a run waits. Nothing is written here."""
