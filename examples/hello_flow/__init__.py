"""The smallest flow: read the price of each article of a vendor's price list. Copy it to write your own."""

from .flow import FLOW

__all__ = ["FLOW"]
