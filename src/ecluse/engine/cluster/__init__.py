"""The work that replicas of a cluster do beside claims and stories: heartbeat, take-over, forced ends, periodic jobs,
alerts, and the storage of traces as rows."""
