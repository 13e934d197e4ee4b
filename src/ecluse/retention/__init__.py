"""Deletion of old rows, and erasure of personal data and tenants."""
