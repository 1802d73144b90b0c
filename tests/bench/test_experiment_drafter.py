"""Retrieval and heads: what is missing is named, and a small run gives the recorded text with every setup."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.experiment_data import make_text

from rest_local.bench.experiments import retrieval_and_drafter as experiment
from rest_local.bench.experiments.inputs import Inputs
from rest_local.bench.results import Journal
from rest_local.errors import InputInvalid, ModelInvalid


def test_an_installation_without_heads_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "demo_model", lambda: tmp_path / "demo.gguf")
    with pytest.raises(InputInvalid, match=r"demo-eagle3\.gguf: the heads of the demo model are in a checkout only"):
        experiment.targets(Inputs(tmp_path))


def test_a_failed_conversion_is_refused_with_its_last_line(tmp_path: Path) -> None:
    program, output = tmp_path / "mimo2.py", tmp_path / "out.gguf"
    program.write_text("import sys\nsys.argv[6]\nopen(sys.argv[6], 'w').close()\nraise ImportError('No module gguf')\n")
    with pytest.raises(InputInvalid, match="No module gguf"):
        experiment._convert(program, tmp_path / "layer", output)
    assert not output.exists()


def test_all_ways_decode_the_recorded_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PROMPTS_QUICK", 1), ("TOKENS_QUICK", 24), ("KINDS", ("unseen",)), ("DATASTORE_QUICK", 2000)):
        monkeypatch.setattr(experiment, name, value)
    failing = tmp_path / "failing.py"
    failing.write_text("raise ImportError('No module gguf')\n")
    convert = experiment._convert
    monkeypatch.setattr(experiment, "_convert", lambda program, *files: convert(failing, *files))
    told: list[str] = []
    inputs = Inputs(tmp_path, text=(make_text(tmp_path / "text"),), quick=True, tell=told.append)
    data = experiment.run(inputs, Journal(tmp_path / "journal", {}))
    assert "No module gguf" in data["left_out"]["mtp"]
    (ways,) = data["heads"]["eagle3"].values()
    for way, kinds in ways.items():
        row = kinds["unseen"]
        assert row["answers"] == 1  # the first one is not counted
        assert row["tokens"] == 24
        assert row["mat"] == pytest.approx(24 / row["steps"], abs=1e-4)
        assert row["speedup"] > 0
        assert way == "both" or (row["head_share"] > 0) == (way == "head")
    assert ways["retrieval"]["unseen"]["head_share"] == 0
    assert experiment.run(inputs, Journal(tmp_path / "journal", {})) == data  # nothing is decoded again
    assert len([line for line in told if line.startswith("decoded")]) == 3


def test_words_say_where_both_together_lose() -> None:
    def ways(retrieval: float, head: float, both: float) -> Any:
        rows = {"retrieval": retrieval, "head": head, "both": both}
        return {way: {kind: {"speedup": value} for kind in experiment.KINDS} for way, value in rows.items()}

    words = experiment._words({"mtp": {"one": ways(2.0, 1.5, 1.0), "other": ways(1.0, 2.0, 3.0)}})
    assert words[0] == (
        "mtp, stored prompts: both together are 0.50 to 1.50 times as fast as the better one alone; ahead on 1 of 2 "
        "cost curves."
    )


def test_a_model_without_mtp_layers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rest_local.paths import demo_model

    monkeypatch.setattr(experiment, "generate", lambda *_: [])
    monkeypatch.setattr(experiment, "DATASTORE_QUICK", 2000)
    inputs = Inputs(tmp_path, model=demo_model(), text=(make_text(tmp_path / "text"),), quick=True)
    with pytest.raises(ModelInvalid, match="has no MTP layer"):
        experiment.run(inputs, Journal(tmp_path / "journal", {}))
