"""Text to tokens and back, special tokens, and the hash that identifies a vocabulary."""

import os
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import few
from support.spelling import text_of

from benchmarks import gguf_file
from benchmarks.gguf_file import byte_vocabulary
from benchmarks.tiny import tiny
from rest_local.errors import ModelInvalid, OptionError
from rest_local.llama import tokenizer as tokenizer_module
from rest_local.llama import vocabulary as vocabulary_module
from rest_local.llama.gguf import vocabulary_file
from rest_local.llama.model import Model
from rest_local.llama.options import ModelOptions, Override
from rest_local.llama.vocabulary import Detokenizer, Vocabulary, pieces_of

TinyModel = Callable[..., Path]
TINY_HASH = "1af7ebf7f7ebe57bed6dc17ab6caf2d5f50a6c2ee4c7d1c574b920e6dce4d918"


@pytest.fixture(scope="module", params=["qwen2", "llama-spm"])
def shared(request: pytest.FixtureRequest, vocabulary_of: Callable[[str], Vocabulary]) -> Vocabulary:
    return vocabulary_of(request.param)


def _bytes(vocabulary: Vocabulary, text: str | bytes) -> bytes:
    return b"".join(vocabulary.piece(int(token)) for token in vocabulary.tokenize(text))


@given(text=st.text(max_size=200))
@few(25)
def test_pieces_of_a_text_are_the_text(vocabulary: Vocabulary, text: str) -> None:
    assert _bytes(vocabulary, text) == text.encode()


@given(data=st.binary(max_size=100))
@few(25)
def test_bytes_that_are_not_utf8_are_replaced_before_llama_cpp_sees_them(vocabulary: Vocabulary, data: bytes) -> None:
    assert _bytes(vocabulary, data) == data.decode("utf-8", "replace").encode()


def test_a_text_that_is_too_long_is_refused(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit applies to one call of llama.cpp."""
    monkeypatch.setattr(tokenizer_module, "MAX_TEXT_BYTES", 10)
    with pytest.raises(OptionError, match="11 bytes"):
        vocabulary.tokenize("x" * 11)


def test_special_tokens_are_text_unless_requested(vocabulary: Vocabulary) -> None:
    text = "<|im_end|>"
    assert len(vocabulary.tokenize(text, special=True)) == 1
    assert len(vocabulary.tokenize(text)) > 1
    assert _bytes(vocabulary, text) == text.encode()


@pytest.mark.parametrize("token", [-1, 384, 2**31 - 1])
def test_ids_outside_the_vocabulary_never_reach_llama_cpp(vocabulary: Vocabulary, token: int) -> None:
    with pytest.raises(ValueError, match="outside the vocabulary"):
        vocabulary.piece(token)
    assert not vocabulary.is_end(token)
    assert not vocabulary.is_control(token)


def test_the_hash_is_frozen(vocabulary: Vocabulary) -> None:
    """Datastores on disk contain it: a change of the rule makes all of them unusable."""
    assert vocabulary.hash == TINY_HASH
    assert vocabulary.identity == (vocabulary.hash, 384, vocabulary.name)


def test_models_that_share_a_tokenizer_share_the_hash(tiny_model: TinyModel, vocabulary: Vocabulary) -> None:
    for arch, options in (("qwen2", {}), ("llama", {"seed": 2}), ("llama", {"vocab": 512})):
        with Model.open(tiny_model(arch, **options), vocab_only=True) as model:
            assert model.vocabulary.hash == vocabulary.hash


def test_overridden_keys_change_the_hash_of_that_model_alone(tmp_path: Path) -> None:
    """Two models of one file are in one process, and either is opened first."""
    options = ModelOptions(override_kv=(Override("tokenizer.ggml.eos_token_id", "int", 0),))
    for name, order in (("a", (ModelOptions(), options)), ("b", (options, ModelOptions()))):
        path = tiny("llama", tmp_path / f"{name}.gguf")
        found = {}
        for chosen in order:
            with Model.open(path, vocab_only=True, options=chosen) as model:
                found[bool(chosen.override_kv)] = model.vocabulary.hash
        assert found[False] == TINY_HASH
        assert found[True] != TINY_HASH


def _hash_after(tmp_path: Path, name: str, key: str, value: object) -> str:
    keys = byte_vocabulary().keys | {key: value}
    model_keys = {"block_count": 1, "context_length": 64, "embedding_length": 64, "feed_forward_length": 64}
    model_keys |= {"attention.head_count": 2}
    path = tmp_path / f"{name}.gguf"
    floats = {"attention.layer_norm_rms_epsilon": 1e-5}
    gguf_file.write(path, "llama", model_keys | floats, gguf_file.Vocabulary(384, keys), [])
    with Model.open(path, vocab_only=True) as model:
        return model.vocabulary.hash


def test_another_piece_order_or_special_token_changes_the_hash(vocabulary: Vocabulary, tmp_path: Path) -> None:
    tokens = list(byte_vocabulary().keys["tokenizer.ggml.tokens"])
    assert _hash_after(tmp_path, "same", "tokenizer.ggml.tokens", tokens) == vocabulary.hash
    swapped = [tokens[1], tokens[0], *tokens[2:]]
    assert _hash_after(tmp_path, "order", "tokenizer.ggml.tokens", swapped) != vocabulary.hash
    renamed = ["\N{SNOWMAN}", *tokens[1:]]
    assert _hash_after(tmp_path, "piece", "tokenizer.ggml.tokens", renamed) != vocabulary.hash
    assert _hash_after(tmp_path, "eos", "tokenizer.ggml.eos_token_id", 0) != vocabulary.hash


def test_every_piece_of_a_real_vocabulary_matches_its_spelling(shared: Vocabulary) -> None:
    """Naive oracle: GPT-2's byte alphabet for BPE, U+2581 and <0xNN> for SentencePiece, control tokens as spelled."""
    alphabet = {character: byte for byte, character in enumerate(gguf_file._byte_tokens())}
    sentencepiece = shared.type == 1
    for token in (*range(1000), *range(1000, shared.size, 7)):
        text, piece = text_of(shared, token), shared.piece(token)
        if shared.is_control(token) or text.startswith("[PAD"):
            continue  # its spelling or nothing, by kind of vocabulary
        if sentencepiece and len(text) == 6 and text.startswith("<0x"):
            assert piece == bytes([int(text[3:5], 16)])
        elif sentencepiece:
            assert piece == text.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode() or text == "<unk>"
        else:
            assert piece == bytes(alphabet[character] for character in text)


def test_real_vocabularies_keep_text_and_long_pieces(shared: Vocabulary) -> None:
    text = "def f(x):\n    return x  # \N{SNOWMAN} 日本語 🎉\n" + " " * 200
    assert _bytes(shared, text).lstrip() == text.encode().lstrip()  # SentencePiece adds a space in front
    assert len(shared.hash) == 64
    if shared.type == 2:
        assert max(map(len, pieces_of(shared))) > 64


_utf8_pieces = st.lists(st.one_of(st.binary(max_size=4), st.text(max_size=3).map(str.encode)))


def _streamed(pieces: list[bytes]) -> list[str]:
    detokenizer = Detokenizer(pieces.__getitem__)
    return [*(detokenizer.feed(i) for i in range(len(pieces))), detokenizer.finish()]


@given(pieces=_utf8_pieces)
def test_stream_concatenates_to_the_whole_text(pieces: list[bytes]) -> None:
    assert "".join(_streamed(pieces)) == b"".join(pieces).decode("utf-8", "replace")


@given(text=st.text(max_size=30))
def test_valid_text_fed_byte_by_byte_has_no_replacement_and_nothing_late(text: str) -> None:
    """Each character is returned with its last byte, not later."""
    data = text.encode()
    stream = _streamed([data[i : i + 1] for i in range(len(data))])
    assert "".join(stream) == text
    assert [part for part in stream if part] == list(text)
    assert stream[-1] == ""


def test_replacement_stands_only_for_what_is_invalid_or_cut_off() -> None:
    assert _streamed([b"\xe2\x82", b"\xac"]) == ["", "€", ""]
    assert _streamed([b"a\xff", b"b"]) == ["a\ufffd", "b", ""]
    assert _streamed([b"\xf0\x9f", b"x"]) == ["", "\ufffdx", ""]
    assert _streamed([b"\xf0\x9f"]) == ["", "\ufffd"]


def test_exact_for_every_token_of_a_real_vocabulary(shared: Vocabulary) -> None:
    pieces = pieces_of(shared)
    assert pieces[::50] == [shared.piece(token) for token in range(0, shared.size, 50)]
    order = np.random.default_rng(3).permutation(len(pieces)).tolist()
    for tokens in (range(len(pieces)), order):
        detokenizer = Detokenizer(pieces.__getitem__)
        streamed = "".join([*map(detokenizer.feed, tokens), detokenizer.finish()])
        assert streamed == b"".join(pieces[token] for token in tokens).decode("utf-8", "replace")


def test_a_lone_surrogate_is_replaced(vocabulary: Vocabulary) -> None:
    assert _bytes(vocabulary, "a\ud800b") == b"a?b"


# ---- Files of a vocabulary alone -----------------------------------------------------------------------------------


DEMO = Path(__file__).parents[2] / "models/demo.gguf"
TEXT = "def area(self):\n    return 3.14 * self.radius ** 2  # caf\u00e9 \u4f60\u597d\n"


def test_a_shipped_vocabulary_is_the_same_without_the_model(tmp_path: Path) -> None:
    moved = tmp_path / "model.gguf"
    moved.write_bytes(DEMO.read_bytes())
    with Model.open(moved, vocab_only=True) as model:
        data = pickle.dumps(model.vocabulary.ship())
        own = (model.vocabulary.hash, model.vocabulary.name, model.vocabulary.size)
        ids = model.vocabulary.tokenize(TEXT)
    moved.unlink()
    assert len(data) < DEMO.stat().st_size / 50
    with pickle.loads(data)() as vocabulary:
        assert (vocabulary.hash, vocabulary.name, vocabulary.size) == own
        assert np.array_equal(vocabulary.tokenize(TEXT), ids)


def test_the_first_file_of_several_gives_a_file_that_stands_alone(tmp_path: Path) -> None:
    whole = vocabulary_file(DEMO)
    magic, version, tensors, keys = struct.unpack_from("<4sIqq", whole)
    name = b"split.count"
    key = struct.pack("<Q", len(name)) + name + struct.pack("<IH", 2, 5)
    first = tmp_path / "first.gguf"
    first.write_bytes(struct.pack("<4sIqq", magic, version, tensors, keys + 1) + whole[24:] + key)
    assert vocabulary_file(first) == whole
    assert tensors == 0


def test_a_file_that_ends_anywhere_in_its_keys_is_refused(tmp_path: Path) -> None:
    data, path = vocabulary_file(DEMO), tmp_path / "short.gguf"
    for length in [*random.Random(1).sample(range(24, len(data)), 40), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(ModelInvalid, match="damaged or truncated"):
            vocabulary_file(path)


def test_the_hash_is_kept_for_the_file_and_computed_again_for_a_changed_one(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REST_LOCAL_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_model("llama").read_bytes())

    def found() -> str:
        monkeypatch.setattr(vocabulary_module, "_hashes", {})  # as in another process
        with Model.open(path, vocab_only=True) as model:
            return model.vocabulary.hash

    computed = found()
    (kept,) = (tmp_path / "cache").glob("vocabulary-*")
    for content, expected in (("0" * 64, "0" * 64), ("damaged", computed), ("\xff", computed)):
        kept.write_text(content, "latin-1")
        assert found() == expected
    kept.write_text("0" * 64)
    os.utime(path, (1, 1))
    assert found() == computed
