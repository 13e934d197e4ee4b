"""Fiches of the CRM: fetched in full, cached, shown to callers within their scope. Other flows import this package; it
imports none of them."""
