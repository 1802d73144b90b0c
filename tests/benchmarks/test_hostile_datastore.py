"""A datastore in which every context continues with a wrong token costs at most 3%."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.curves import load_curve
from benchmarks.recorded import Recorded
from benchmarks.replay import replay
from rest_local.drafting.sources import Sources
from rest_local.planning.policies import make_policy
from rest_local.retrieval.building.build import build
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.format import VocabularyId

N_VOCAB = 900
VOCABULARY = VocabularyId("ab" * 32, N_VOCAB, "test")
WRONG = 16  # tokens after each context


def wrong_continuations(recorded: list[Recorded], agreeing: int) -> Iterator[tuple[str, npt.NDArray[np.integer]]]:
    """Put `agreeing` copies of the same wrong text after every token of every answer, so that a match looks certain."""
    for answer in recorded:
        text = [*answer.prompt[-1:], *answer.answer]
        for place, (token, right) in enumerate(pairwise(text)):
            wrong = [token, *((right + 1 + n) % N_VOCAB for n in range(WRONG))]
            for copy in range(agreeing):
                yield f"{answer.name}.{place}.{copy}", np.array(wrong, np.int32)


@pytest.mark.parametrize(
    ("length", "agreeing", "curve"),
    [
        *((length, agreeing, "cpu-2-cores-0.5b-q4_0") for length, agreeing in ((40, 1), (200, 4))),
        *((length, agreeing, "assumed-flat-to-8") for length, agreeing in ((40, 4), (200, 1))),
    ],
)
def test_wrong_continuations_of_every_match_cost_at_most_three_percent(
    length: int, agreeing: int, curve: str, tmp_path: Path
) -> None:
    random = np.random.default_rng(1)
    recorded = [
        Recorded(str(n), random.integers(0, N_VOCAB, 20).tolist(), random.integers(0, N_VOCAB, length).tolist())
        for n in range(10)
    ]
    build(tmp_path / "store", wrong_continuations(recorded, agreeing), vocabulary=VOCABULARY)
    with Datastore.open(tmp_path / "store", vocabulary_hash=VOCABULARY.hash, vocabulary_name=VOCABULARY.name) as store:
        tally = replay(
            recorded, lambda: Sources([store], N_VOCAB), make_policy("auto", load_curve(curve)), load_curve(curve)
        )
        rows = Sources([store], N_VOCAB)
        rows.restart(recorded[0].answer[:5])
        assert rows.rows()  # there are rows to draft from
    assert tally.speedup >= 0.97
    assert tally.changed == 0
