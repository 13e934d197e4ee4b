"""The database: connections and pools, the embedded server, LISTEN/NOTIFY."""
