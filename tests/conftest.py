"""Shared by all tests: generated examples are the same in every run.

``pytest --hypothesis-profile=explore`` looks at new ones.
"""

from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("same")
