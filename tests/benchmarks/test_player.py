"""Players write recorded answers in any program."""

from pathlib import Path

import numpy as np
import pytest
from support.toy import demo_model

from benchmarks import player
from rest_local.decoding.engine import Engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return player.write(demo_model(), tmp_path_factory.mktemp("player") / "player.gguf", width=768, layers=1)


def test_a_player_writes_the_answers_that_were_put_into_it_last(model: Path) -> None:
    random = np.random.default_rng(1)
    changed = model.stat().st_mtime_ns
    for _ in range(2):
        first, second = (random.integers(300, 4000, n).tolist() for n in (60, 50))
        prompt, longer = list(range(300, 340)), list(range(300, 420))
        player.play(model, (prompt, first), (longer, second))
        with Engine.load(model, n_ctx=512) as engine:
            assert engine.generate(prompt, max_tokens=60).wait().tokens == first
            assert engine.generate(list(range(400, 440)), max_tokens=70).wait().tokens == first  # whatever is asked
            assert engine.generate(longer, max_tokens=60).wait().tokens == second
    assert model.stat().st_mtime_ns == changed
