"""The comparison of drafters: which sources a setup has, what its clock charges, and one small run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import clocked, drafters
from rest_local import build_datastore
from rest_local.calibration.curves import load_curve
from rest_local.llama.model import Model
from rest_local.paths import demo_model
from rest_local.planning.policy import StepCost

CURVE = drafters.CURVES[0]
STEP = StepCost(n_ctx=100, n_nodes=3, n_accepted=1, decode_ms=99.0, driver_ms=99.0, lookup_ms=99.0)


def test_all_together_is_compared_with_every_part_of_its_target() -> None:
    assert {whole.name for whole in drafters.WHOLE} == {"all (eagle3)", "all (mtp)"}
    names = {part.name for part in drafters.parts_of(drafters.WHOLE[0])}
    assert names == {"retrieval", "logits", "eagle3", "retrieval + eagle3"}


def test_the_best_part_is_the_one_with_the_greatest_figure() -> None:
    found: dict[str, Any] = {setup.name: {"stored": {"speedup": 1.0}} for setup in drafters.SETUPS}
    found["logits"]["stored"]["speedup"] = 2.0
    found["all (eagle3)"]["stored"]["speedup"] = 1.5
    compared = drafters.together(found, "speedup")
    assert compared["all (eagle3)"] == {"stored": {"over_best_part": 0.75, "best_part": "logits"}}
    assert compared["all (mtp)"]["stored"]["over_best_part"] == 1.0


def fake_head(sizes: list[int]) -> Any:
    """A head that makes passes of these sizes when it is asked."""
    batch = SimpleNamespace(n_tokens=0)
    head = SimpleNamespace(name="head", failed=False, times=None, context=SimpleNamespace(batch=batch))
    head.context.decode = lambda: 0

    def answer(queries: object) -> list[object]:
        for size in sizes:
            batch.n_tokens = size
            head.context.decode()
        return []

    head.answer = answer
    return head


def test_a_clock_charges_the_curve_and_the_passes_of_the_head() -> None:
    line = load_curve(CURVE).at(100)
    clock = clocked.Clock(load_curve(CURVE), 0.1, fake_head([1, 4]))
    charged = clocked.Charged(clock.head, clock)  # type: ignore[arg-type]
    with clock:
        charged.answer([])
        done = clock.step(STEP, charged.query_ms)
        assert clock.unpaid == 0.0
        clock.step(STEP._replace(n_nodes=0, lookup_ms=None), 0.0)
    head_ms = 0.1 * (line[0] + line[3])
    assert done.decode_ms == line[3]
    assert done.query_ms == pytest.approx(head_ms)
    assert clock.head_ms == pytest.approx(head_ms)
    drivers = sum(clocked.DRIVER_MS) + clocked.LOOKUP_MS
    assert clock.ms == pytest.approx(line[3] + line[0] + drivers + head_ms)


def test_a_clock_leaves_the_head_as_it_was() -> None:
    head = fake_head([1])
    decode = head.context.decode
    with clocked.Clock(load_curve(CURVE), 0.1, head):
        assert head.context.decode is not decode
    assert head.context.decode is decode
    assert head.times is None


def test_one_line_of_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two setups of the demo model with one prompt, and a datastore of its own text."""
    chosen = tuple(setup for setup in drafters.SETUPS if setup.name in ("retrieval", "eagle3"))
    (tmp_path / "code").mkdir()
    (prompt,) = [prompt for prompt in drafters.prompts() if prompt.title == "queue.py"]
    (tmp_path / "code" / "queue.py").write_text(prompt.text)
    with Model.open(demo_model(), vocab_only=True) as model:
        build_datastore(tmp_path / "store", [tmp_path / "code"], vocabulary=model.vocabulary)
    monkeypatch.setattr(drafters, "ensure", lambda model: tmp_path / "store")
    monkeypatch.setattr(drafters, "prompts", lambda: [prompt])
    monkeypatch.setattr(drafters, "_warm_up", lambda *_: None)
    monkeypatch.setattr(drafters, "SETUPS", chosen)
    monkeypatch.setattr(drafters, "WHOLE", ())
    words = ["drafters", "--prompts", "1", "--tokens", "24", "--repeats", "1", "--curves", CURVE]
    monkeypatch.setattr("sys.argv", words)
    drafters.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = result["clock"][f"{CURVE}, 10%"]
    for found in (result["measured"], rows):
        assert set(found["retrieval"]["stored"]["accepted_by_source"]) <= {"datastore", "context"}
        assert set(found["eagle3"]["stored"]["accepted_by_source"]) <= {"model"}
        assert all(found[setup.name]["stored"]["prompts"] == 1 for setup in chosen)
    assert rows["retrieval"]["stored"]["head_ms_per_step"] == 0.0
    assert rows["eagle3"]["stored"]["head_ms_per_step"] > 0.0
    assert rows["eagle3"]["stored"]["mat"] > 1.0
