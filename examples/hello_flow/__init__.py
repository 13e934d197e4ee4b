"""A small flow: read the price of each article of a vendor's price list and, if the input asks for it, write there.
Copy it to write your own."""

from .flow import FLOW

__all__ = ["FLOW"]
