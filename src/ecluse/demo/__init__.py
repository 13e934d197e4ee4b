"""Scripted demonstrations: real processes, real sockets, a real kill; nothing here is needed to run the product."""
