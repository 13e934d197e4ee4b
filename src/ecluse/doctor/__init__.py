"""Checks of an installation (settings, disk, database), with advice per problem."""
