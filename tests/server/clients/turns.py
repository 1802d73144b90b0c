"""Agents that are run as programs against a server whose model says what a turn wants."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

WRONG = "def add(a, b):\n    return a - b\n"
RIGHT = "def add(a, b):\n    return a + b\n"


class Turns:
    """The answers of a scripted model, one for each request, in pieces; the last one again where they are used up."""

    def __init__(self, *answers: str) -> None:
        self._answers = answers
        self.asked = 0

    def __iter__(self) -> Iterator[str]:
        text = self._answers[min(self.asked, len(self._answers) - 1)]
        self.asked += 1
        return (text[i : i + 7] for i in range(0, len(text), 7))


def call(name: str, **arguments: Any) -> str:
    """An answer that reasons and calls a tool."""
    return f"<think>I look.</think>\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def program(name: str, variable: str) -> str:
    """The program that the environment names, or one on the path; skips the test without one."""
    found = os.environ.get(variable) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; see the module's text")
    return found


def environment(home: Any, keep: Sequence[str] = ("PATH", "LANG", "TMPDIR")) -> dict[str, str]:
    """An environment in which a program finds no settings of this user, and no credentials."""
    kept = {name: os.environ[name] for name in keep if name in os.environ}
    folders = {f"XDG_{kind}_HOME": str(home / kind.lower()) for kind in ("CONFIG", "DATA", "CACHE", "STATE")}
    return kept | folders | {"HOME": str(home), "NO_COLOR": "1"}
