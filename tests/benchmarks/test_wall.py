"""A replay through a real context yields the recorded tokens, times both sides, and its curve can be stored."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.curves import load_curve
from benchmarks.recorded import Recorded, open_workload
from benchmarks.wall import main, wall_clock
from rest_local.calibration.cost import CostCurve
from rest_local.drafting.sources import Sources
from rest_local.errors import OptionError
from rest_local.llama.model import Model
from rest_local.planning.policies import make_policy
from rest_local.planning.policy import Policy

COPY = "The quick brown fox jumps over the lazy dog, and then it goes home to sleep. "
TEXT = [10 + n % 7 + n // 3 for n in range(40)]
ANSWERS = [Recorded("copy", TEXT, TEXT), Recorded("new", [5, 6], list(range(60, 100)))]


def sources() -> Sources:
    return Sources([], 300)


class FixedCurve(CostCurve):
    """A curve that learns nothing from real steps."""

    def observe(self, n: int, n_ctx: int, ms: float) -> None:
        return


def flat(curve: CostCurve) -> Policy:
    """Return a policy that plans as if verification were free, so that it drafts on any machine."""
    return make_policy("auto", FixedCurve.from_points([0], [1, 64], [[50.0, 50.0]]))


def test_both_sides_yield_the_recorded_tokens_and_their_times_give_the_speedup(tiny_model: Callable[..., Path]) -> None:
    _, report = wall_clock(str(tiny_model("llama")), ANSWERS, sources, flat, rounds=1)
    assert report["tokens"] == sum(len(answer.answer) - 1 for answer in ANSWERS)
    assert report["mat"] > 1.2
    assert report["nodes_per_step"] > 0
    ratio = report["plain_ms_per_token"] / report["drafted_ms_per_token"]
    assert report["speedup"] == pytest.approx(ratio, rel=0.01)
    assert report["rounds"] == [report["speedup"]]
    assert report["implied_over_wall"] == pytest.approx(report["implied"]["speedup"] / report["speedup"], rel=0.01)


def test_the_command_replays_a_file_and_stores_the_curve(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers, curve = tmp_path / "answers.jsonl", tmp_path / "curve.json"
    lines = [{"instruction": COPY, "output": COPY + str(n)} for n in range(3)]
    answers.write_text("\n".join(map(json.dumps, lines)))
    arguments = [str(answers), "-m", str(tiny_model("llama")), "--history", "2", "--save-curve", str(curve)]
    monkeypatch.setattr(sys, "argv", ["wall", *arguments])
    main()
    told, report = capsys.readouterr().out.splitlines()
    assert told.startswith("tiny llama: ")
    assert json.loads(report)["answers"] == 2
    assert load_curve(str(curve)).contexts


@pytest.mark.parametrize("history", ["0", "3"])
def test_a_history_leaves_answers_on_both_sides(tiny_model: Callable[..., Path], tmp_path: Path, history: str) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text((json.dumps({"instruction": "a", "output": "b"}) + "\n") * 3)
    with Model.open(tiny_model("llama"), vocab_only=True) as model, pytest.raises(OptionError, match="3 answers"):
        open_workload(model.vocabulary, files=[answers], history=history).__enter__()
