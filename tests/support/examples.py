"""How many examples a property gets: few in each run of the tests, and many in `make soak`."""

import os

from hypothesis import settings

USUAL = 30


def few(n: int) -> settings:
    """Return `n` examples, and as many times more as REST_LOCAL_EXAMPLES is more than usual, up to ten times."""
    wanted = int(os.environ.get("REST_LOCAL_EXAMPLES", USUAL))
    return settings(max_examples=n * min(max(1, wanted // USUAL), 10))
