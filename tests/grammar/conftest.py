"""Real vocabularies for grammars: BPE, SentencePiece with byte tokens, the demo model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rest_local.llama.model import Model
from rest_local.llama.vocabulary import Vocabulary
from rest_local.paths import demo_model


@pytest.fixture(scope="module", params=["demo", "ggml-vocab-qwen2.gguf", "ggml-vocab-llama-spm.gguf"])
def any_vocabulary(request: pytest.FixtureRequest, shared_data: Callable[[str], Path]) -> Iterator[Vocabulary]:
    path = demo_model() if request.param == "demo" else shared_data(request.param)
    with Model.open(path, vocab_only=True) as model:
        yield model.vocabulary
