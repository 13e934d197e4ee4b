"""What the replicas of a cluster do for each other: heartbeat, take-over, forced ends, periodic jobs; and the storage
of traces as rows."""
