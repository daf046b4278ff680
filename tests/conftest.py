"""What all tests share: one Hypothesis profile, and a chain of causes that a seed reproduces."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# The same examples on every run: a failure in CI is a failure at home. Deadlines would measure the machine.
settings.register_profile(
    "shoal",
    derandomize=True,
    deadline=None,
    max_examples=100,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("shoal")
