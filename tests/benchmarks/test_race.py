"""Players write the recorded answer in any program; the race compares times and texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import player, race
from rest_local.bench.workload import Recorded
from rest_local.decoding.engine import Engine
from rest_local.paths import demo_model

SETTINGS = {"width": 512, "layers": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return player.write(demo_model(), tmp_path_factory.mktemp("player") / "player.gguf", **SETTINGS)


def test_a_player_writes_the_answer_that_was_put_into_it_last(model: Path) -> None:
    prompt, random = list(range(300, 340)), np.random.default_rng(1)
    changed = model.stat().st_mtime_ns
    for _ in range(2):
        answer = random.integers(300, 4000, 60).tolist()
        player.play(model, prompt, answer)
        with Engine.load(model, n_ctx=512) as engine:
            assert engine.generate(prompt, max_tokens=60).wait().tokens == answer
            assert engine.generate(list(range(400, 440)), max_tokens=60).wait().tokens == answer  # whatever is asked
    assert model.stat().st_mtime_ns == changed


def test_an_answer_longer_than_the_context_is_refused(model: Path) -> None:
    with pytest.raises(ValueError, match="500 \\+ 13 tokens do not fit the player's 512"):
        player.play(model, [300] * 500, [301] * 13)


def test_a_race_leaves_out_a_side_that_fails_or_writes_another_text(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [Recorded("a", [300] * 8, [301, 302]), Recorded("b", [300] * 8, [303, 304])]
    sides = [race.Side(name, [name]) for name in (race.PLAIN, "twice", "wrong", "dies")]

    def timed(side: race.Side, answer: Recorded) -> tuple[float, list[int]]:
        if side.name == "dies":
            raise race.ServerFailed("ends at its start")
        tokens = [301, 9] if side.name == "wrong" else answer.answer
        return 2.0 if side.name == race.PLAIN else 1.0, tokens

    monkeypatch.setattr(race, "timed", timed)
    found = race.race(model, sides, answers, 2, lambda line: None)
    assert found["speed_up"]["twice"] == {"mean": 2.0, "low": 2.0, "high": 2.0, "worst": 2.0}
    assert found["plain_ms_per_token"] == 1000.0
    assert set(found["failed"]) == {"wrong", "dies"}
    assert "from token 1 of a" in found["failed"]["wrong"]
