"""`rest-local demo` with a fake engine: what is shown, what is printed, how it ends."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_cli_engine import HELLO, Call, FakeEngine, FakePiece, Install
from rich.console import Console

from rest_local.bench import demo as measurement
from rest_local.bench.demo import Prompt
from rest_local.cli import demo as demo_module
from rest_local.cli.demo import Screen


@pytest.fixture
def no_datastore(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def datastore(choice: Any, code: Path | None, say: Any) -> Iterator[tuple[str, str]]:
        yield "stdlib", str(code or "the library")

    monkeypatch.setattr(demo_module, "_datastore", datastore)


@pytest.mark.usefixtures("no_datastore")
def test_a_pipe_gets_both_texts_and_three_lines_of_result(fake_engine: Install, call: Call) -> None:
    engine = fake_engine()
    done = call("demo", "-m", "demo", "--repeats", "1")
    assert done.code == 0
    lines = done.out.splitlines()
    assert done.out.count("-- plain\nHello\n-- drafted\nHello\n") == 1
    assert lines[-3] == " 1.50 x  150 tokens/s, same output: queue.py, put changed, 60% drafted"
    assert lines[-2].endswith("csv.py, not stored: repeats its own text")
    assert "rest-local chat -m MODEL" in lines[-1]
    assert "{" not in done.out
    assert max(map(len, lines)) <= 80
    assert engine.config.datastores == ("stdlib",)
    assert engine.config.exact


@pytest.mark.usefixtures("no_datastore")
def test_different_output_in_exact_mode_is_exit_1(fake_engine: Install, call: Call) -> None:
    other = [FakePiece("x", (9,), ("target",))]
    fake_engine(HELLO, HELLO, other, HELLO)  # the first drafted run of the first prompt
    done = call("demo", "-m", "demo", "--repeats", "1")
    assert done.code == 1
    assert "exact mode: drafted output differs from plain decoding (edit)" in done.err


def test_without_a_model_a_player_writes_an_edit_of_the_users_file(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement, "PLAYER", (512, 1))
    monkeypatch.setattr(measurement, "CONTEXT", 512)
    code = tmp_path / "totals.py"
    code.write_text("".join(f"def total_{i}(price):\n    return price + {i}\n\n\n" for i in range(50)))
    done = call("demo", "-n", "500", "--repeats", "1", "--code", str(code))
    assert done.code == 0, done.err
    assert done.out.count("def total_0(new_price):\n    return new_price + 0\n") == 2
    edit, unseen, last = done.out.splitlines()[-3:]
    assert "same output: totals.py, one name changed" in edit
    assert "same output: csv.py" in unseen
    assert last == "A player's text is given, its times are real. Yours: rest-local demo -m MODEL"


def test_a_disk_without_room_for_a_player_is_told_in_one_line(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "PLAYER", (1 << 20, 1000))  # petabytes
    done = call("demo")
    assert done.code == 2
    assert re.fullmatch(r"rest-local: error: .*: no room for \d+ MB; TMPDIR names another folder\n", done.err)


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
