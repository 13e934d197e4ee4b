"""Calls that change something at a vendor (writes), or cost money (paid calls)."""
