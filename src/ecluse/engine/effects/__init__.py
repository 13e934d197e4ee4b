"""Calls to vendors with an effect outside: calls that change something (writes), and calls that cost money (paid
calls)."""
