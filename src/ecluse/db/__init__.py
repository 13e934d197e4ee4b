"""The one database: connections, the embedded server, LISTEN/NOTIFY."""
