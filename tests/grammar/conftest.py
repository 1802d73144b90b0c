"""Real vocabularies for grammars: BPE, SentencePiece with byte tokens, the demo model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from rest_local.llama.model import Model
from rest_local.llama.vocabulary import Vocabulary
from rest_local.paths import demo_model


@pytest.fixture(scope="session")
def opened() -> Iterator[Callable[[Path], Vocabulary]]:
    """Each vocabulary is opened once: preparing a large one for grammars takes seconds."""
    with ExitStack() as stack:
        yield cache(lambda path: stack.enter_context(Model.open(path, vocab_only=True)).vocabulary)


@pytest.fixture(scope="module", params=["demo", "ggml-vocab-qwen2.gguf", "ggml-vocab-llama-spm.gguf"])
def any_vocabulary(
    request: pytest.FixtureRequest, shared_data: Callable[[str], Path], opened: Callable[[Path], Vocabulary]
) -> Vocabulary:
    return opened(demo_model() if request.param == "demo" else shared_data(request.param))
