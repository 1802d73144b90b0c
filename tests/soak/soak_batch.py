"""Batches that are killed at 50 random moments each, and then go on to their end. Not collected by `make test`, whose
tests kill a few times; `make soak` names this file.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.batches import kill_and_go_on

KILLS = 50


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_batches_killed_at_random(tmp_path: Path, name: str) -> None:
    """Complete and without duplicates, however often it was killed."""
    advanced = kill_and_go_on(tmp_path, name, kills=KILLS, requests=2000, random=random.Random(name))
    print(f"{name}: killed {KILLS} times, {advanced} times with new answers in the output")
    assert advanced > 0
