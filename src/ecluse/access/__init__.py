"""Access control (tenants, API keys, permissions), secrets at rest, the audit trail, and what all HTTP answers
share."""
