"""The bar of a build, and where a question can be asked."""

from __future__ import annotations

import io
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rest_local.cli import terminal

SOURCE: Any = SimpleNamespace(measure=lambda: (1, 1000))
NEVER: Any = SimpleNamespace(measure=lambda: pytest.fail("walked for nothing"))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(monkeypatch: pytest.MonkeyPatch, width: int, *steps: tuple[str, int]) -> str:
    """The bar after these steps of a build of 1 000 bytes."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    for name, value in {"COLUMNS": str(width), "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    with terminal.build_bar(False, [SOURCE]) as progress:
        for step in steps:
            progress(*step)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue())
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "\n", lines)
    return [line for line in lines.splitlines() if "tokenizing" in line or "sorting" in line][-1]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_bar_shows_share_tokens_speed_and_time_left(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    shown = drawn(monkeypatch, width, ("read", 250), ("tokenized", 81))
    assert re.search(r"tokenizing .* 25% 81 tokens, [\d,]+/s -?[\d-]+:[\d-]+", shown), shown
    shown = drawn(monkeypatch, width, ("read", 250), ("read", 750), ("tokenized", 81), ("sorted", 81))
    assert re.search(r"sorting .*100% 81 tokens", shown), shown


def test_a_question_needs_a_terminal_and_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    from concurrent.futures import ThreadPoolExecutor

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert terminal.can_ask()
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(terminal.can_ask).result()
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert not terminal.can_ask()
