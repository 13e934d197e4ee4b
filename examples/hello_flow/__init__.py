"""The smallest flow: read the price of each article of a vendor's price list. Copy it to write your own."""

from hello_flow.flow import FLOW

__all__ = ["FLOW"]
