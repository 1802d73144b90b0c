"""Changes come from a diff, and the steps to find the place from the recorded steps."""

import pytest

from benchmarks.divergence import changes, measure, steps_to_find
from rest_local.bench.recorded import Recorded

OLD = list(range(100, 300))


@pytest.mark.parametrize(
    ("new", "kind", "begin"),
    [
        ([*OLD[:50], 7, *OLD[51:]], "replace 1", 51),
        ([*OLD[:50], 7, 8, *OLD[50:]], "insert 2-7", 52),
        ([*OLD[:50], *OLD[60:]], "delete 8+", 50),
    ],
)
def test_changes_have_a_kind_and_a_length(new: list[int], kind: str, begin: int) -> None:
    assert list(changes(OLD, new)) == [(kind, begin, len(new))]


def test_a_short_copied_run_is_not_counted() -> None:
    assert list(changes(OLD, [*OLD[:50], 7, *OLD[51:55], 8, *OLD[56:]])) == [("replace 1", 56, len(OLD))]


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ([(40, 20)], 0),  # one draft extends over the change into the run
        ([(49, 0), (50, 0), (51, 8)], 1),
        ([(50, 1), (52, 1), (54, 2), (57, 10)], 3),
        ([(50, 0), (51, 0)], 2),  # never found
    ],
)
def test_steps_count_from_the_beginning_of_the_run(steps: list[tuple[int, int]], found: int) -> None:
    assert steps_to_find(steps, 50, 100) == found


def test_a_replay_finds_the_place_of_an_inserted_token() -> None:
    edits = [Recorded("edit", [1, 2, 3], [*OLD[:80], 7, *OLD[80:]], OLD)]
    found = measure(edits, [OLD], 1000, "rtx3090-8b-q4_0")
    assert list(found) == ["insert 1"]
    assert found["insert 1"][0] <= 3
