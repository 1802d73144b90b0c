"""The vocabulary of a model as a file of its own, for machines without the model."""

from __future__ import annotations

import pickle
import random
import struct
from pathlib import Path

import numpy as np
import pytest

from rest_local.errors import ModelInvalid
from rest_local.llama.gguf import vocabulary_file
from rest_local.llama.model import Model

DEMO = Path(__file__).parents[2] / "models/demo.gguf"
TEXT = "def area(self):\n    return 3.14 * self.radius ** 2  # caf\u00e9 \u4f60\u597d\n"


def test_a_shipped_vocabulary_is_the_same_without_the_model(tmp_path: Path) -> None:
    """Also for the fast tokenizer, whose pre-tokenizer the file names."""
    moved = tmp_path / "model.gguf"
    moved.write_bytes(DEMO.read_bytes())
    with Model.open(moved, vocab_only=True) as model:
        data = pickle.dumps(model.vocabulary.ship())
        own = (model.vocabulary.hash, model.vocabulary.name, model.vocabulary.size)
        ids, bulk = model.vocabulary.tokenize(TEXT), model.vocabulary.bulk()
        assert bulk is not None
        (in_bulk,) = bulk([TEXT])
    moved.unlink()
    assert len(data) < DEMO.stat().st_size / 50
    with pickle.loads(data)() as vocabulary:
        assert (vocabulary.hash, vocabulary.name, vocabulary.size) == own
        assert np.array_equal(vocabulary.tokenize(TEXT), ids)
        bulk = vocabulary.bulk()
        assert bulk is not None
        assert np.array_equal(bulk([TEXT])[0], in_bulk)


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
