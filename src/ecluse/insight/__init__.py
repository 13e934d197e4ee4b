"""The read side of runs: lists, details, causes of waiting. Nothing is written here."""
