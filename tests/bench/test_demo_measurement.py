"""The demo's measurement on scripted generations: identical runs, sampling, and the speed-up."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.toy import demo_model

from rest_local.bench import demo
from rest_local.bench.demo import Prompt
from rest_local.decoding.results import DraftStatistics
from rest_local.llama.model import Model
from rest_local.retrieval import Datastore, VocabularyId
from rest_local.retrieval.building.indexing import build_datastore

PROMPT = Prompt("stored", "a title", "text")


class ScriptedEngine:
    """`answer(policy, sampling, call)` returns the tokens; the speed depends on the policy."""

    def __init__(self, answer: Any) -> None:
        self._answer, self.calls = answer, []

    def generate(self, prompt: str, *, max_tokens: int, sampling: Any, policy: str | None, prediction: str) -> Any:
        self.calls.append((policy, sampling))
        tokens = self._answer(policy, sampling, len(self.calls))
        speed = {"off": 100.0, None: 100.0 + 10 * len(self.calls)}[policy]
        draft = DraftStatistics(steps=1, generated=2, drafted=2, accepted=1)
        timings = SimpleNamespace(predicted_per_second=speed)
        return Stream(SimpleNamespace(tokens=tokens, draft=draft, timings=timings))


class Stream:
    def __init__(self, result: Any) -> None:
        result.to_dict = lambda: {"text": "t", "tokens": len(result.tokens)}
        self.result = result

    def __iter__(self) -> Any:
        return iter(["piece"])


def measure(answer: Any, repeats: int = 3, **more: Any) -> tuple[ScriptedEngine, demo.Comparison]:
    engine: Any = ScriptedEngine(answer)
    return engine, demo.compare(engine, PROMPT, "exact", max_tokens=30, repeats=repeats, **more)


def test_runs_are_interleaved_and_speedup_is_the_median_of_pairs() -> None:
    engine, result = measure(lambda *_: list(range(30)))
    assert [policy for policy, _ in engine.calls] == ["off"] + ["off", None] * 4
    # timed pairs end with the calls 5, 7 and 9
    assert result.drafted.speeds == (150.0, 170.0, 190.0)
    assert result.speedup == pytest.approx(1.7)
    assert result.identical
    assert not result.sampled


def test_both_sides_sample_with_one_seed_if_greedy_decoding_loops() -> None:
    engine, result = measure(lambda _, sampling, __: [1] * 30 if sampling.is_greedy else list(range(30)))
    assert result.sampled
    assert {(s.seed, s.temperature) for _, s in engine.calls[1:]} == {(demo.SEED, demo.TEMPERATURE)}
    assert "seed" in result.to_json()["sampling"]


# ---- The datastore of the demo -------------------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REST_LOCAL_DATASTORES", str(tmp_path / "home"))
    folder = tmp_path / "library"
    (folder / "test").mkdir(parents=True)
    for name in ("queue.py", "csv.py", "test/unit.py"):  # csv is held out
        (folder / name).write_text(f"import os  # {name}\n")
    monkeypatch.setattr(demo, "standard_library", lambda: folder)
    return folder


@pytest.fixture(scope="module")
def vocabulary() -> VocabularyId:
    with Model.open(demo_model(), vocab_only=True) as model:
        return VocabularyId(*model.vocabulary.identity)


def test_it_holds_the_library_and_is_built_once(library: Path, vocabulary: VocabularyId) -> None:
    messages: list[str] = []
    path = demo.ensure(demo_model(), messages.append)
    assert path.name == f"demo-stdlib-{vocabulary.hash[:12]}"
    with Datastore.open(path) as store:
        assert store.document_names() == [str(library / "queue.py")]
    assert demo.ensure(demo_model(), messages.append) == path
    assert len(messages) == 1
    assert path.name in messages[0]


@pytest.mark.parametrize("wrong", ["damaged", "of another interpreter"])
def test_a_wrong_datastore_of_the_demo_is_built_again(library: Path, wrong: str) -> None:
    path = demo.ensure(demo_model())
    if wrong == "damaged":
        (path / "manifest.json").write_text("{}")
    else:
        with Model.open(demo_model(), vocab_only=True) as model:
            recipe = {"kind": demo.KIND, "python": "2.7"}
            build_datastore(path, [library], vocabulary=model.vocabulary, recipe=recipe)
    messages: list[str] = []
    demo.ensure(demo_model(), messages.append)
    assert len(messages) == 1
    with Datastore.open(path) as store:
        assert store.check() > 0
        assert store.manifest.recipe["python"] != "2.7"
