"""Audits: a model answers, from a fiche's transcripts, the steps of a config; its quotes are looked for in them."""
