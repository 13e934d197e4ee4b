"""The parts of a flow, and the pure decisions about states, retries and breakers."""
