"""The outbox: events written in the transaction of the fact that they announce, and their publisher."""
