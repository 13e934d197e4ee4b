"""Scripted demonstrations: real processes, real sockets, a real kill. The product does not need this package."""
