"""Calls that change something at a vendor, or cost money."""
