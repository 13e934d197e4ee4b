"""The HTTP face: routes are thin, and each says what it needs."""
