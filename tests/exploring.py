"""How many examples a property draws, and whether they are new ones: the two Hypothesis profiles of this suite.

Owns: `ci`, under which every run draws the same examples (CI must not fail on an unlucky day, nor pass on a lucky
one), and `explore`, which draws new ones and many more (`make fuzz`). Does not own: any property. HYPOTHESIS_PROFILE
names the profile; a planted fault's run says `derandomize=True` itself: finding it must not depend on the profile.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# The profile of `make test` and CI, and the one of `make fuzz`.
CI, EXPLORE = "ci", "explore"
# Hypothesis' own default, for a property that names no number.
_DEFAULT_COUNT = 100
# How many times more examples `explore` draws: ten minutes on two cores for all properties.
_EXPLORE_FACTOR = 10


def load_profile() -> None:
    """Register both profiles and load the one that HYPOTHESIS_PROFILE names; without it, `ci`."""
    settings.register_profile(CI, derandomize=True, database=None, deadline=None, max_examples=_DEFAULT_COUNT)
    settings.register_profile(
        EXPLORE,
        derandomize=False,
        deadline=None,
        max_examples=_DEFAULT_COUNT * _EXPLORE_FACTOR,
        print_blob=True,  # a failure is played again from what it prints
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", CI))


def examples(count: int) -> int:
    """How many examples a property that wants `count` of them in CI draws under the profile that is loaded."""
    return count * (_EXPLORE_FACTOR if settings.get_current_profile_name() == EXPLORE else 1)
