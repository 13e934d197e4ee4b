"""Access control (tenants, API keys, permissions), secrets at rest, the audit trail, and the parts that all HTTP
answers share."""
