"""`rest-local index` as tests call it, with a byte vocabulary in place of a model's."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from rest_local.cli import index
from rest_local.cli.index import group


class ByteVocabulary:
    """A vocabulary in which every byte is a token."""

    name, size, hash = "bytes", 256, "b0" * 32

    def tokenize(self, text: str, *, special: bool = False) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def piece(self, token: int) -> bytes:
        return bytes([token])


class NamedVocabulary(ByteVocabulary):
    """A vocabulary that differs for each name."""

    def __init__(self, name: str) -> None:
        self.name, self.hash = name, name.encode().hex().ljust(64, "0")


def replace_models(
    patch: pytest.MonkeyPatch, folder: Path, of: Callable[[Path], Any] = lambda path: ByteVocabulary()
) -> None:
    """Replace every model by its vocabulary as `of` gives it, with datastores and the working directory in `folder`."""
    patch.delenv("REST_LOCAL_MODEL", raising=False)
    patch.setattr(group, "open_vocabulary", lambda path: nullcontext(of(path)))
    patch.setattr(group, "model_path", lambda value: Path(value or "toy.gguf"))
    patch.setenv("REST_LOCAL_DATASTORES", str(folder / "home"))
    patch.chdir(folder)


def call(*arguments: str | Path, stdin: bytes | str = b"") -> Result:
    return CliRunner().invoke(index.index, [str(one) for one in arguments], input=stdin, catch_exceptions=False)


def answer(*arguments: str | Path, stdin: bytes | str = b"") -> dict[str, Any]:
    """Run a command, and return the one line of JSON that it prints."""
    (line,) = call(*arguments, "--json", stdin=stdin).stdout.splitlines()
    return json.loads(line)
