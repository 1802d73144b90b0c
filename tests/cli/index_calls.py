"""`rest-local index` as tests call it, with a byte vocabulary in place of a model's."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner, Result

from rest_local.cli import index


class ByteVocabulary:
    """Every byte is a token."""

    name, size, hash = "bytes", 256, "b0" * 32

    def tokenize(self, text: str, *, special: bool = False) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def piece(self, token: int) -> bytes:
        return bytes([token])


def call(*arguments: str | Path, stdin: bytes | str = b"") -> Result:
    return CliRunner().invoke(index.index, [str(one) for one in arguments], input=stdin, catch_exceptions=False)


def answer(*arguments: str | Path) -> dict[str, Any]:
    """The one line of JSON that a command prints."""
    (line,) = call(*arguments, "--json").stdout.splitlines()
    return json.loads(line)
