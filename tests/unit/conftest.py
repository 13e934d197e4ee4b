"""Properties are about values, not about how fast a busy machine computes them; nothing is kept between runs."""

from hypothesis import settings

settings.register_profile("unit", deadline=None, database=None)
settings.load_profile("unit")
