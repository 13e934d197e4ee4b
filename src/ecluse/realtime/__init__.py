"""Realtime events for subscribers: channels, the hub, the Pusher protocol. Best effort: nothing here may fail or delay
a run, and every fact in an event can be read by HTTP as well."""
