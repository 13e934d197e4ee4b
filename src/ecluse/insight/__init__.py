"""What people read about runs: lists, details, causes of waiting. Reads only."""
