"""The fixture `call`: one command line in this process."""

import io
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rest_local.cli.main import run

Call = Callable[..., Any]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Return a function that runs one command line in this process, stdin given as bytes."""

    def invoke(*arguments: str, stdin: bytes = b"") -> Any:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        code = run(arguments)
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return invoke
