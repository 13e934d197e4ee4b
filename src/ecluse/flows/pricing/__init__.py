"""Pricing: rules that change prices of a connected shop in bulk, with a preview, a plan that is applied exactly,
retries, rollback and reconciliation."""
