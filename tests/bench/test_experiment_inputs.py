"""What experiments measure with: text of a size, recorded answers, the key of a run, and what is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.experiment_data import SENTENCE, make_data, make_text

from rest_local.bench.experiments import generations
from rest_local.bench.experiments.catalog import EXPERIMENTS, load
from rest_local.bench.experiments.generations import generate, module_prompts
from rest_local.bench.experiments.inputs import ANSWERS, Inputs
from rest_local.bench.prompts import standard_library, well_known_modules
from rest_local.bench.results import Journal
from rest_local.errors import CorpusEmpty, InputInvalid
from rest_local.llama.model import Model


@pytest.fixture
def inputs(tmp_path: Path, tiny_model: Callable[..., Path]) -> Inputs:
    model = tiny_model("llama")
    return Inputs(
        tmp_path, model, data=make_data(tmp_path / "data", model), text=(make_text(tmp_path / "text"),), quick=True
    )


def test_text_ends_in_edited_copies_and_its_record_says_how_many(inputs: Inputs) -> None:
    with Model.open(inputs.model_path, vocab_only=True) as model:
        real = inputs.documents(model.vocabulary, 10**6, copies=False)
        longer = inputs.documents(model.vocabulary, 2 * real.tokens)
        again = inputs.documents(model.vocabulary, 2 * real.tokens)
        other = replace(inputs, seed=1).documents(model.vocabulary, 2 * real.tokens)
    assert len(real.documents) == 3
    assert real.real == real.tokens
    assert longer.tokens == 2 * real.tokens
    assert longer.real == real.tokens
    assert longer.record()["edited_copies"] == 0.5
    assert longer.record() == again.record()
    assert longer.record()["sha256"] != other.record()["sha256"]
    assert longer.first(real.tokens).record() == real.record()
    assert longer.first(0).documents == []
    assert len(longer.segment()) == longer.tokens + len(longer.documents)


def test_installed_text_begins_with_the_modules_that_the_demo_model_knows(inputs: Inputs) -> None:
    with Model.open(inputs.model_path, vocab_only=True) as model:
        text = replace(inputs, text=()).documents(model.vocabulary, 300)
        begun = b"".join(map(model.vocabulary.piece, text.documents[0].tolist()))
    modules = [standard_library() / name for name in well_known_modules()]
    assert any(path.read_bytes().startswith(begun) for path in modules if path.is_file())
    assert text.tokens == 300
    assert "Python" in text.source


def test_a_folder_without_text_is_refused(inputs: Inputs, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with Model.open(inputs.model_path, vocab_only=True) as model, pytest.raises(CorpusEmpty, match="empty"):
        replace(inputs, text=(tmp_path / "empty",)).documents(model.vocabulary, 100)


def test_recorded_answers_have_the_vocabulary_of_their_set(inputs: Inputs) -> None:
    for name in ANSWERS:
        with inputs.vocabulary(name) as model:
            answers = inputs.answers(name, model.vocabulary, 5)
            assert len(answers) == 5
            text = b"".join(map(model.vocabulary.piece, answers[0].answer)).decode()
            assert text.strip().startswith(SENTENCE[:20])
        assert inputs.has(name)


def test_a_missing_file_is_named(inputs: Inputs) -> None:
    assert inputs.data is not None
    missing = inputs.data / ANSWERS["MT-Bench"].vocabulary
    missing.unlink()
    assert not inputs.has("MT-Bench")
    with pytest.raises(InputInvalid, match="ggml-vocab-llama-spm"):
        inputs.vocabulary("MT-Bench")
    with pytest.raises(InputInvalid, match="give `data`"):
        replace(inputs, data=None).file("HumanEval.jsonl.gz")


def test_the_key_of_a_run_depends_on_everything_that_the_figures_do(
    inputs: Inputs, tiny_model: Callable[..., Path]
) -> None:
    key = inputs.key("own-text")
    assert key == inputs.key("own-text")
    others = [
        inputs.key("domains"),
        *(
            replace(inputs, **change).key("own-text")
            for change in (
                {"model": tiny_model("qwen2")},
                {"data": None},
                {"text": ()},
                {"seed": 1},
                {"quick": False},
                {"tokens": 5},
            )
        ),
    ]
    assert inputs.data is not None
    with (inputs.data / ANSWERS["AlpacaEval"].file).open("a") as file:
        file.write("\n")
    others.append(inputs.key("own-text"))
    assert all(other != key for other in others)


def test_every_experiment_has_its_name_and_a_summary() -> None:
    assert len(set(EXPERIMENTS.values())) == len(EXPERIMENTS)
    for name in EXPERIMENTS:
        experiment = load(name)
        assert name == experiment.NAME
        assert 20 < len(experiment.SUMMARY) <= 100
        assert experiment.run.__doc__
        assert experiment.section.__doc__


def test_generations_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    inputs = Inputs(tmp_path, tell=told.append)
    journal = Journal(tmp_path / "journal", {})
    (answer,) = generate(inputs, journal, "unseen", 1, 6)
    assert len(answer.answer) == 6
    assert told == [f"generated: unseen {answer.name}"]
    monkeypatch.setattr(generations, "choose_sampling", None)  # nothing is generated again
    assert generate(inputs, Journal(tmp_path / "journal", {}), "unseen", 1, 6) == [answer]
    with Model.open(inputs.model_path, vocab_only=True) as model:
        text = b"".join(map(model.vocabulary.piece, answer.prompt)).decode()
    assert text == next(module_prompts("unseen")).text
    assert np.array(answer.answer).max() < model.n_vocab
