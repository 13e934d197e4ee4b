"""What a flow is made of, and the pure decisions about states and retries."""
