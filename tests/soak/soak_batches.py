"""Batches of one machine that are killed at random moments, and then go on to their end.

Not collected by `make test`, which kills once.
"""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.batches import kill_and_go_on

KILLS = 50


def test_batches_killed_at_random(tmp_path: Path) -> None:
    """Complete and without duplicates, however often it was killed."""
    advanced = kill_and_go_on(tmp_path, kills=KILLS, requests=2000, random=random.Random(1))
    print(f"killed {KILLS} times, {advanced} times with new answers in the output")
    assert advanced > 0
