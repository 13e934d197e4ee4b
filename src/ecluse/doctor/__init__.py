"""Checks of an installation, with advice per problem."""
