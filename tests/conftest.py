"""Shared by all tests: hypothesis never judges by the clock of a busy machine."""

from hypothesis import settings

settings.register_profile("asyncrl", deadline=None)
settings.load_profile("asyncrl")
