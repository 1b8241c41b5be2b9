"""Settings of the fuzz tests: fixed draws, or with `--hypothesis-profile=large` fifty times as many random ones."""

from hypothesis import HealthCheck, settings


def fuzzed(divisor: int = 1) -> settings:
    """Return the settings of a test that tries the profile's number of examples, divided by `divisor`."""
    profile = settings().max_examples
    return settings(
        max_examples=profile // divisor,
        derandomize=profile <= 100,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
