"""What the processes of a cluster do for each other: heartbeat, take-over, sweeps."""
