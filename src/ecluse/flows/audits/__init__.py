"""Audits: a model answers the steps of a config from a fiche's transcripts, and each of its quotes is searched for in
them."""
