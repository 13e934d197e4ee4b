"""Who may do what: tenants, API keys, permissions, secrets at rest, audit trail, and what all HTTP answers share."""
