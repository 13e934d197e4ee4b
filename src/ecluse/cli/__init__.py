"""The command line: reads arguments, calls the rest, prints. No decisions."""
