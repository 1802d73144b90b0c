"""`rest-local demo` with a fake engine: what is shown, what is printed, how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from fake_cli_engine import HELLO, FakeEngine, FakePiece
from rich.console import Console

from rest_local.bench.prompts import Prompt
from rest_local.cli import demo as demo_module
from rest_local.cli.demo import Screen

Install = Callable[..., FakeEngine]
Call = Callable[..., Any]


@pytest.fixture(autouse=True)
def _no_datastore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_module, "prepare_datastore", lambda choice, quiet: "stdlib")


def test_a_pipe_gets_text_then_a_table_then_one_line_of_json(fake_engine: Install, call: Call) -> None:
    engine = fake_engine()
    done = call("demo", "--repeats", "1")
    assert done.code == 0
    assert done.out.count("-- plain\nHello\n-- drafted\nHello\n") == 6  # three prompts, two modes
    line = json.loads(done.out.splitlines()[-1])
    assert (line["identical"], line["speedup"], line["text"]) == (True, 1.5, "Hello")
    assert line["headline"] == {"prompt": "stored", "mode": "exact"}
    assert [(row["prompt"], row["mode"]) for row in line["prompts"]] == [
        (kind, mode) for mode in ("exact", "fast") for kind in ("unseen", "stored", "copy")
    ]
    assert engine.choice.datastore == ("stdlib",)
    assert not engine.choice.exact  # the last mode


def test_json_prints_nothing_but_the_line(fake_engine: Install, call: Call) -> None:
    fake_engine()
    done = call("demo", "--repeats", "1", "--json")
    assert done.out.count("\n") == 1
    assert done.err == ""
    assert json.loads(done.out)["plain"]["tokens_per_second"] == 100.0


def test_different_output_in_exact_mode_is_exit_1(fake_engine: Install, call: Call) -> None:
    other = [FakePiece("x", (9,), ("target",))]
    fake_engine(HELLO, HELLO, other, HELLO)  # the first drafted run of the first prompt
    done = call("demo", "--repeats", "1")
    assert done.code == 1
    assert "exact mode: drafted output differs from plain decoding (unseen)" in done.err
    assert json.loads(done.out.splitlines()[-1])["prompts"][0]["identical"] is False


def test_terminal_shows_two_columns_with_tokens_in_the_colour_of_their_source() -> None:
    console = Console(force_terminal=True, width=80, height=30, record=True, color_system="standard", no_color=False)
    engine: Any = FakeEngine([HELLO])
    screen = Screen(engine, console)
    with console.capture() as capture:
        screen.begin(Prompt("stored", "a title", "text"), "fast", sampled=True)
        for side in ("plain", "drafted"):
            for piece in HELLO:
                screen.piece(side, piece)  # type: ignore[arg-type]
        screen.end()
    shown = capture.get()
    assert "a title" in shown
    assert "sampled" in shown
    assert "\x1b[1;32mH\x1b[0m" in shown  # datastore
    assert "\x1b[1;36ml\x1b[0m" in shown  # context
    assert any("plain" in line and "drafted" in line for line in shown.splitlines())


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    console = Console(force_terminal=True, width=80)
    engine: Any = FakeEngine([HELLO])
    screen = Screen(engine, console)
    with console.capture() as capture:
        screen.begin(Prompt("stored", "a title", "text"), "fast", sampled=False)
        screen.piece("plain", HELLO[0])  # type: ignore[arg-type]
        screen.end()
    assert "\x1b[1;32m" not in capture.get()
