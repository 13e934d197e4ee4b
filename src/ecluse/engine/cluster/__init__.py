"""What the replicas of a cluster do for each other: heartbeat, take-over, sweeps. Also trace rows."""
