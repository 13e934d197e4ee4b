"""Audits: a model answers the steps of a config from a fiche's transcripts; its quotes are looked up in them."""
