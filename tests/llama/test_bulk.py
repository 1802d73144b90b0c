"""The ids of the bulk tokenizer are those of llama.cpp for the whole text, whatever the text and whatever is known."""

import random
from collections.abc import Callable
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama_cpp import llama_cpp as bindings
from support.examples import few
from support.toy import demo_model

from rest_local.llama import model as model_module
from rest_local.llama import tokenizer
from rest_local.llama.bulk import SAMPLE, BulkTokenizer, SeparatePairs, bulk_tokenizer
from rest_local.llama.model import Model
from rest_local.llama.options import ModelOptions, Override
from rest_local.llama.vocabulary import Vocabulary

PIECES = (
    *("def", "Foo", "camelCase", "x", "HTTP", " ", "  ", "    ", "\t", "\t\t", "\n", "\n\n", "\r\n", "\r", "\v", "\f"),
    *("'s", "'S", "'ll", "'RE", "'", "''", '"', "0", "7", "12", "345", "6789", "(", ")", "):", "...", "----", "_", "="),
    *("\u00e9", "e\u0301", "\u4e2d\u6587", "\u3002", "\u00a0", "\u2028", "\u0085", "\U0001f389", "\u00bd", "\u212a"),
    *("\u2581", "\u017f", "\u200d", "\ufeff", "\u0e01\u0e33", "\0", "\x1c", "\x7f", "\ud800"),
    *("<s>", "</s>", "<unk>", "<|im_end|>", "<|endoftext|>", "<0x0A>", "<0x", "[PAD151700]", "[PAD1517", "\\n"),
)
TEXTS = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=60).map("".join),
    st.text(st.characters(max_codepoint=0x7F), max_size=80),
    st.text(max_size=60),
    st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=40).map("".join),
)


def whole(vocabulary: Vocabulary, text: str) -> list[int]:
    """One call of llama.cpp for the whole text."""
    data = text.encode("utf-8", "replace")
    tokens = np.empty(len(data) + 64, np.int32)
    address = tokens.ctypes.data_as(bindings.llama_token_p)
    count = llama_cpp.llama_tokenize(vocabulary.pointer, data, len(data), address, len(tokens), False, False)
    return tokens[:count].tolist()


@pytest.fixture(scope="module", params=["qwen2", "llama-bpe", "llama-spm"])
def vocabulary(request: pytest.FixtureRequest, vocabulary_of: Callable[[str], Vocabulary]) -> Vocabulary:
    return vocabulary_of(request.param)


@pytest.fixture(scope="module")
def bulk_of(vocabulary: Vocabulary) -> BulkTokenizer:
    made = vocabulary.bulk()
    assert isinstance(made, BulkTokenizer)
    return made


@given(texts=st.lists(TEXTS, min_size=1, max_size=4), forget=st.booleans())
@few(15)
def test_random_text_gives_the_ids_of_the_whole(
    vocabulary: Vocabulary, bulk_of: BulkTokenizer, texts: list[str], forget: bool
) -> None:
    if forget:
        bulk_of._known.clear()
    assert [ids.tolist() for ids in bulk_of(texts)] == [whole(vocabulary, text) for text in texts]


def test_code_gives_the_ids_of_the_whole_and_mostly_from_known_words(
    vocabulary: Vocabulary, bulk_of: BulkTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [path.read_text() for path in sorted(Path(tokenizer.__file__).parent.glob("*.py"))]
    texts += [text.replace("\n", "\r\n") for text in texts] + [SAMPLE]
    bulk_of(texts)
    monkeypatch.setattr(type(bulk_of._words), "lookup", lambda self, words: iter([(word, b"") for word in words]))
    for text, ids in zip(texts, bulk_of(texts), strict=True):
        if text.isascii():  # every word was known before
            assert ids.tolist() == whole(vocabulary, text)


@pytest.mark.parametrize("kind", ["gpt-2", "gpt-4o", "deepseek-v3", "bloom"])
def test_a_wrong_name_of_the_pre_tokenizer_is_noticed_or_harmless(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Harmless where no token is made of what the patterns divide differently, as in a small vocabulary."""
    monkeypatch.setattr(model_module, "ensure_loadable", lambda *_: None)  # no child tries the same file again
    options = ModelOptions(override_kv=(Override.parse(f"tokenizer.ggml.pre=str:{kind}"),))
    numbers = random.Random(3)
    texts = ["".join(numbers.choices(PIECES, k=40)) for _ in range(10)]
    with Model.open(demo_model(), vocab_only=True, options=options) as model:
        bulks = [model.vocabulary._tokenizer.bulk(name) for name in ("llama-bpe", "qwen2")]
        assert all(bulks) or kind not in ("llama-bpe", "qwen2")
        assert not any(bulks) or kind not in ("gpt-2", "bloom", "deepseek-v3")
        expected = [whole(model.vocabulary, text) for text in texts] if any(bulks) else []
        for made in filter(None, bulks):
            assert [ids.tolist() for ids in made(texts)] == expected


def test_a_vocabulary_with_line_breaks_inside_tokens_has_no_separate_pairs() -> None:
    def call(text: str) -> np.ndarray:
        return np.array([3], np.int32)

    assert SeparatePairs.of(["a", "\n", "\n\n"], call) is None
    assert SeparatePairs.of(["a", "\n", "ab"], call) is not None


def test_other_ids_than_those_of_the_whole_text_give_none() -> None:
    made = bulk_tokenizer(
        bindings.LLAMA_VOCAB_TYPE_BPE,
        "qwen2",
        [],
        lambda text: [text],
        lambda text: np.array([1], np.int32),
        lambda text: np.array([2], np.int32),
    )
    assert made is None
