"""Real vocabularies for grammars: BPE, SentencePiece with byte tokens, the demo model's."""

from collections.abc import Callable

import pytest

from rest_local.llama.vocabulary import Vocabulary


@pytest.fixture(scope="module", params=["demo", "qwen2", "llama-spm"])
def any_vocabulary(request: pytest.FixtureRequest, vocabulary_of: Callable[[str], Vocabulary]) -> Vocabulary:
    return vocabulary_of(request.param)
