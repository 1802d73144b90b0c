"""The demo model as mimo2 says what the demo says. Its heads draft as in llama.cpp's own driver:
`tests/benchmarks/test_peer_drafts.py`."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.library import held_out_modules, standard_library, well_known_modules
from models.mimo2 import convert
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.model import Model

WINDOW = 120  # tokens of each text


@pytest.fixture(scope="module")
def trunk(demo_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the demo model as mimo2, without an MTP layer."""
    path = tmp_path_factory.mktemp("trunk") / "demo-mimo2.gguf"
    convert(demo_gguf, path)
    return path


@pytest.fixture(scope="module")
def whole(demo_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the demo model as mimo2 with its MTP layer, in one file."""
    path = tmp_path_factory.mktemp("whole") / "demo-with-mtp.gguf"
    convert(demo_gguf, path, demo_gguf.with_name("demo-mtp.gguf"))
    return path


def logits_of(path: Path, texts: list[str]) -> list[np.ndarray]:
    """Return the logits after each of the first tokens of each text, [WINDOW, vocabulary]."""
    found = []
    settings = ContextSettings(n_ctx=WINDOW, n_branches=1, threads=1)
    with Model.open(path) as model, Context(model, settings) as context:
        step = min(context.max_outputs, context.n_batch)
        for text in texts:
            context.clear()
            tokens, rows = model.vocabulary.tokenize(text)[:WINDOW], []
            for begin in range(0, len(tokens), step):
                part = tokens[begin : begin + step]
                context.batch.fill(part, np.arange(begin, begin + len(part)), 0, 1, 1)
                assert context.decode() == 0
                rows.append(context.logits(len(part)).copy())
            found.append(np.concatenate(rows))
    return found


def test_as_mimo2_the_demo_model_makes_the_same_choices(demo_gguf: Path, trunk: Path, whole: Path) -> None:
    names = [*well_known_modules()[:2], *held_out_modules()[:3]]
    texts = [path.read_text("utf-8")[2000:] for name in names if (path := standard_library() / name).is_file()]
    assert len(texts) > 2
    wanted = np.concatenate(logits_of(demo_gguf, texts))
    best = np.sort(wanted, axis=1)
    clear = best[:, -1] - best[:, -2] > 0.5  # logits move by up to 0.3: matrices of Q8_0 round their input
    assert clear.mean() > 0.4
    for path in (trunk, whole):
        same = np.concatenate(logits_of(path, texts)).argmax(1) == wanted.argmax(1)
        assert same[clear].all()
        assert same.mean() > 0.99


def test_a_conversion_refuses_other_models_and_heads(demo_gguf: Path, trunk: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"does not hold the layer blk\.6\."):
        convert(demo_gguf, tmp_path / "out.gguf", demo_gguf.with_name("demo-eagle3.gguf"))
    with pytest.raises(ValueError, match="of the architecture mimo2, not llama"):
        convert(trunk, tmp_path / "out.gguf")
