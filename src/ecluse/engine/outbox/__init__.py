"""The outbox: events, written in the transaction that makes them true, and their publisher."""
