"""`rest-local demo` with a fake engine: what is shown, what is printed, how it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_cli_engine import HELLO, Call, FakeEngine, FakePiece, Install
from rich.console import Console

from rest_local.bench.demo import Prompt
from rest_local.cli import demo as demo_module
from rest_local.cli.demo import Screen


@pytest.fixture(autouse=True)
def _no_datastore(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def datastore(choice: Any, code: Path | None, say: Any) -> Iterator[tuple[str, str]]:
        yield "stdlib", str(code or "the library")

    monkeypatch.setattr(demo_module, "_datastore", datastore)


def test_a_pipe_gets_both_texts_and_three_lines_of_result(fake_engine: Install, call: Call) -> None:
    engine = fake_engine()
    done = call("demo", "--repeats", "1")
    assert done.code == 0
    lines = done.out.splitlines()
    assert done.out.count("-- plain\nHello\n-- drafted\nHello\n") == 1
    assert lines[-3] == " 1.50 x  150 tokens/s, same output: queue.py, put changed, 60% drafted"
    assert lines[-2].endswith("csv.py, not stored: repeats its own text")
    assert "-m MODEL --code FOLDER" in lines[-1]
    assert "{" not in done.out
    assert max(map(len, lines)) <= 80
    assert engine.config.datastores == ("stdlib",)
    assert engine.config.exact


def test_different_output_in_exact_mode_is_exit_1(fake_engine: Install, call: Call) -> None:
    other = [FakePiece("x", (9,), ("target",))]
    fake_engine(HELLO, HELLO, other, HELLO)  # the first drafted run of the first prompt
    done = call("demo", "--repeats", "1")
    assert done.code == 1
    assert "exact mode: drafted output differs from plain decoding (edit)" in done.err


def test_terminal_shows_two_columns_with_tokens_in_the_colour_of_their_source() -> None:
    console = Console(force_terminal=True, width=80, height=30, record=True, color_system="standard", no_color=False)
    engine: Any = FakeEngine([HELLO])
    screen = Screen(engine, console)
    with console.capture() as capture:
        screen.begin(Prompt("stored", "a title", "text"), "fast")
        for side in ("plain", "drafted"):
            for piece in HELLO:
                screen.piece(side, piece)  # type: ignore[arg-type]
        screen.end()
    shown = capture.get()
    assert "\x1b[1;32mH\x1b[0m" in shown  # datastore
    assert "\x1b[1;36ml\x1b[0m" in shown  # context
    assert any("plain" in line and "drafted" in line for line in shown.splitlines())
