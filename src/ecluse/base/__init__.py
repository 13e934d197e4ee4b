"""What everything may use: errors, time and chance, ids, logging. No database, no network."""
