"""Retention: deletion of old rows, erasure of personal data and tenants, and the growth of the database."""
