"""The demo model's draft heads: the mimo2 rewrite says what the demo says, and llama.cpp loads and runs both heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rest_local.bench.prompts import held_out_modules, well_known_modules
from rest_local.llama.model import Model

WINDOW = 320
FLOORS = {("mtp", "stored"): 0.8, ("mtp", "held out"): 0.42, ("eagle3", "stored"): 0.8, ("eagle3", "held out"): 0.36}
"""Shares of first drafted tokens that are the demo's choice; up to a quarter below what models/README.md reports."""


@pytest.fixture(scope="module")
def mimo2(recipe: Callable[[str], ModuleType]) -> ModuleType:
    return recipe("mimo2")


@pytest.fixture(scope="module")
def heads(recipe: Callable[[str], ModuleType]) -> ModuleType:
    return recipe("evaluate_heads")


@pytest.fixture(scope="module")
def mtp_gguf(demo_gguf: Path) -> Path:
    return demo_gguf.with_name("demo-mtp.gguf")


@pytest.fixture(scope="module")
def eagle3_gguf(demo_gguf: Path) -> Path:
    return demo_gguf.with_name("demo-eagle3.gguf")


@pytest.fixture(scope="module")
def trunk(mimo2: ModuleType, demo_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as mimo2, without an MTP layer."""
    path = tmp_path_factory.mktemp("trunk") / "demo-mimo2.gguf"
    mimo2.convert(demo_gguf, path)
    return path


@pytest.fixture(scope="module")
def whole(mimo2: ModuleType, demo_gguf: Path, mtp_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as mimo2 with its MTP layer, in one file."""
    path = tmp_path_factory.mktemp("whole") / "demo-with-mtp.gguf"
    mimo2.convert(demo_gguf, path, mtp_gguf)
    return path


@pytest.fixture(scope="module")
def demo_network(heads: ModuleType, demo_gguf: Path) -> Iterator[Any]:
    with closing(heads.Network(demo_gguf)) as network:
        yield network


@contextmanager
def drafting(heads: ModuleType, kind: str, model: Path, file: Path) -> Iterator[tuple[Any, Any]]:
    """The model as a target, and the head of `file` on it."""
    with closing(heads.Network(model)) as target:
        head = heads.HEADS[kind](target, file)
        with closing(head.network):
            yield target, head


def windows(heads: ModuleType, network: Any, modules: tuple[str, ...], count: int) -> list[np.ndarray]:
    return [tokens[:WINDOW] for tokens in heads.windows_of(network, modules, count)]


def test_halves_moves_neighbouring_pairs_apart_within_each_head(mimo2: ModuleType) -> None:
    rows = np.arange(16)[:, None] * np.ones((1, 3), int)  # two heads of 8
    moved = mimo2.halves(rows, 8)[:, 0].tolist()
    assert moved == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]


def test_as_mimo2_the_demo_model_makes_the_same_choices(
    heads: ModuleType, demo_network: Any, trunk: Path, whole: Path
) -> None:
    texts = [
        *windows(heads, demo_network, well_known_modules(), 4),
        *windows(heads, demo_network, held_out_modules(), 8),
    ]
    for path in (trunk, whole):
        with closing(heads.Network(path)) as network:
            same = []
            for tokens in texts:
                demo_network.cut(0)
                network.cut(0)
                expected, got = demo_network.decode(tokens, 0), network.decode(tokens, 0)
                same.append(expected.argmax(1) == got.argmax(1))
                best = np.sort(expected, axis=1)
                clear = best[:, -1] - best[:, -2] > 0.5  # logits move by up to 0.3: matrices of Q8_0 round their input
                assert same[-1][clear].all()
                assert clear.mean() > 0.4
            assert np.concatenate(same).mean() > 0.99


def test_the_rewritten_model_opens_as_any_model(whole: Path, demo_gguf: Path) -> None:
    with Model.open(whole) as model, Model.open(demo_gguf) as demo:
        assert model.n_layer == demo.n_layer
        assert model.chat_template == demo.chat_template
        text = "def total(items):\n    <|im_end|>"
        assert model.vocabulary.tokenize(text).tolist() == demo.vocabulary.tokenize(text).tolist()
        assert model.vocabulary.eos == demo.vocabulary.eos


def test_the_mtp_layer_computes_the_same_in_a_file_of_its_own(
    heads: ModuleType, trunk: Path, whole: Path, mtp_gguf: Path
) -> None:
    drafts = []
    for model, file in ((trunk, mtp_gguf), (whole, whole)):
        with drafting(heads, "mtp", model, file) as (target, head):
            tokens = windows(heads, target, held_out_modules(), 1)[0]
            target.decode(tokens, 0)
            logits, _ = head.read(tokens, heads.shifted(head.features(len(tokens))), 0)
            drafts.append(logits)
    np.testing.assert_allclose(drafts[0], drafts[1], atol=1e-3)


def test_a_conversion_refuses_a_head_of_another_architecture(
    mimo2: ModuleType, demo_gguf: Path, eagle3_gguf: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"does not hold the layer blk\.6\."):
        mimo2.convert(demo_gguf, tmp_path / "out.gguf", eagle3_gguf)


def test_a_conversion_refuses_a_model_that_is_not_llama(mimo2: ModuleType, trunk: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="of the architecture mimo2, not llama"):
        mimo2.convert(trunk, tmp_path / "out.gguf")


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_the_heads_agree_with_the_demo_model(
    heads: ModuleType, kind: str, demo_gguf: Path, trunk: Path, mtp_gguf: Path, eagle3_gguf: Path
) -> None:
    model, file = {"mtp": (trunk, mtp_gguf), "eagle3": (demo_gguf, eagle3_gguf)}[kind]
    with drafting(heads, kind, model, file) as (target, head):
        for name, modules in (("stored", well_known_modules()), ("held out", held_out_modules())):
            counts = heads.Counts()
            for tokens in windows(heads, target, modules, 8):
                heads.on_text(target, head, tokens, counts)
            assert counts.text_hits / counts.text_all > FLOORS[kind, name], name


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_drafts_of_several_tokens_are_accepted(
    heads: ModuleType, kind: str, demo_gguf: Path, trunk: Path, mtp_gguf: Path, eagle3_gguf: Path
) -> None:
    """Later drafted tokens rest on the head's own states; with a wrong pairing they would never be right."""
    model, file = {"mtp": (trunk, mtp_gguf), "eagle3": (demo_gguf, eagle3_gguf)}[kind]
    with drafting(heads, kind, model, file) as (target, head):
        counts = heads.Counts()
        for tokens in windows(heads, target, well_known_modules(), 3):
            heads.on_answer(target, head, tokens[:160], 60, counts)
        shares = [hit / tried for hit, tried in zip(counts.hits, counts.tried, strict=True)]
        assert min(shares[:3]) > 0.5, shares


def test_the_two_files_stay_small(mtp_gguf: Path, eagle3_gguf: Path) -> None:
    assert mtp_gguf.stat().st_size + eagle3_gguf.stat().st_size < 12_000_000
