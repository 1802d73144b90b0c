"""`rest-local chat` in a real terminal: typing, pasting, resizing, stopping and leaving."""

import re
import shlex
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.terminal import Terminal, answered, needs_tmux, prompted
from terminal_chat import ANSWERS

pytestmark = needs_tmux

PROGRAM = Path(__file__).with_name("terminal_chat.py")
PASTED = "def f(x):\n    if x:\n\n        return 1\n"
Open = Callable[..., Terminal]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return the data directory of the chat."""
    return tmp_path / "data"


@pytest.fixture
def chat(data: Path, tmp_path: Path) -> Iterator[Open]:
    """Return a function that starts the chat in a terminal."""
    with ExitStack() as stack:

        def start(
            *options: str, env: dict[str, str] | None = None, ready: str = "/bye to leave", **size: Any
        ) -> Terminal:
            command = [sys.executable, str(PROGRAM), "chat", "-m", "model.gguf", *options]
            given = {"REST_LOCAL_DATA": str(data), "LC_ALL": "C.UTF-8", **(env or {})}
            terminal = stack.enter_context(Terminal(command, env=given, **size))
            terminal.wait_for(ready)
            if ready == "/bye to leave":
                terminal.wait_until(prompted, "prompt")
            return terminal

        yield start


def test_what_is_typed_and_pasted_is_one_message(chat: Open) -> None:
    """It keeps its indentation, Windows line ends are line ends, a path is no command, and Ctrl-D leaves."""
    terminal = chat(width=200, height=60)
    assert "model: /help for help" in terminal.screen(), "the name that -m takes, not the one in the file"
    terminal.type("hello", "Enter")
    assert "1: 'hello'" in answered(terminal)
    terminal.paste(PASTED)
    terminal.wait_for("return 1")
    assert "3: " not in terminal.screen(), "only Enter sends"
    terminal.type("Enter")
    assert f"3: {PASTED.rstrip()!r}" in answered(terminal, 2)
    terminal.paste("one\r\n  two\r\n")
    terminal.wait_for("  two")
    terminal.type("Enter")
    assert r"5: 'one\n  two'" in answered(terminal, 3)
    terminal.type("/usr/bin/env", "Enter")
    assert "7: '/usr/bin/env'" in answered(terminal, 4)
    terminal.type("one", "M-Enter", "  two", "Enter")
    assert r"9: 'one\n  two'" in answered(terminal, 5)
    terminal.type('"""', "Enter", "  one", "Enter", "Enter", 'two"""', "Enter")
    assert r"11: '  one\n\ntwo'" in answered(terminal, 6)
    terminal.type("C-d")
    assert terminal.wait_for_exit() == 0


def being_written(screen: str) -> bool:
    """Return True if the endless answer goes on: its text is the last line, however much of it has scrolled off."""
    return "word" in screen.rpartition("\n")[2]


def test_ctrl_c_stops_the_answer_drops_the_line_and_twice_at_an_empty_one_it_leaves(chat: Open) -> None:
    """What came of the answer is kept, and what is typed during it is not mixed with it."""
    terminal = chat()
    terminal.type("endless", "Enter")
    terminal.wait_until(being_written, "answer")
    terminal.type("typed ahead")
    terminal.wait_for("word9")
    assert "typed" not in terminal.screen()
    terminal.type("C-c")
    answered(terminal)
    terminal.type("half a question")
    terminal.wait_for("half a question")
    terminal.type("C-c")
    terminal.wait_until(prompted, "new prompt")
    terminal.type("C-c")
    terminal.wait_until(lambda screen: "another Ctrl-C" in screen and prompted(screen), "warning")
    terminal.type("next", "Enter")
    assert "3: 'next'" in answered(terminal, 2), "the question, what came of the answer, and this"
    terminal.type("C-c")
    terminal.wait_until(lambda screen: screen.count("another Ctrl-C") == 2 and prompted(screen), "warning")
    terminal.type("C-c")
    assert terminal.wait_for_exit() == 130


def test_ctrl_c_right_after_enter_stops_the_answer(chat: Open) -> None:
    """Both keys are read at once, so the prompt gets Ctrl-C as a key before the terminal sends signals again."""
    terminal = chat()
    terminal.type("endless")
    terminal.press("Enter", "C-c")
    terminal.wait_until(lambda screen: "stopped" in screen and prompted(screen), "end of the answer")
    assert "another Ctrl-C" not in terminal.screen()
    terminal.type("/retry", "Enter")
    terminal.wait_until(being_written, "answer to the question that was stopped")


def test_a_text_that_is_pasted_during_an_answer_is_one_message(chat: Open) -> None:
    """Otherwise each line would be a message, and the system would cut a line of more than 4,095 bytes."""
    terminal = chat(width=200, height=100)
    terminal.type("until a key", "Enter")
    terminal.wait_until(being_written, "answer")
    pasted = " ".join(map(str, range(1200))) + "\n" + PASTED.rstrip()
    terminal.paste(pasted)
    terminal.wait_for("return 1")
    terminal.type("Enter")
    answered(terminal, 2)
    assert f"3: {pasted!r}" in terminal.screen(copied=True)


def test_an_answer_is_copied_as_the_model_wrote_it_and_no_control_sequence_reaches_the_terminal(chat: Open) -> None:
    """Reasoning is dim."""
    terminal = chat(width=60, height=100)
    for number, name in enumerate(("markdown", "code"), 1):
        terminal.type(name, "Enter")
        answered(terminal, number)
        copied = "\n".join(line.rstrip() for line in terminal.screen(copied=True).splitlines())
        assert f"> {name}\n{ANSWERS[name]}\n[" in copied
    terminal.type("control", "Enter")
    screen = answered(terminal, 3)
    assert "/help for help" in screen, "the screen was not erased"
    assert "before\ufffd[2J\ufffd]0;title\ufffdafter" in screen
    terminal.type("think", "Enter")
    answered(terminal, 4)
    coloured = terminal.screen(colours=True)
    assert "\x1b[2;3mfirst a thought" in coloured
    assert "think>" not in coloured
    assert "then an answer" in coloured


def test_an_answer_longer_than_the_screen_scrolls_and_is_complete(chat: Open) -> None:
    terminal = chat(height=10)
    terminal.type("long", "Enter")
    answered(terminal)
    scrolled = terminal.screen(scrolled=True)
    words = scrolled.split()
    numbers = [int(word) for before, word in pairwise(words) if before == "line"]
    assert numbers == list(range(1, 301))


def test_a_resize_during_an_answer_changes_nothing_and_without_history_nothing_is_kept(chat: Open, data: Path) -> None:
    terminal = chat("--no-history", width=100, height=40)
    terminal.type("endless", "Enter")
    for word, width, height in (("word10", 60, 40), ("word20", 120, 30)):
        terminal.wait_for(word)
        terminal.resize(width, height)
    terminal.wait_until(lambda screen: "word40 " in screen.replace("\n", ""), "word40")
    terminal.type("C-c")
    answered(terminal)
    words = re.findall(r"word\d+", terminal.screen(copied=True))
    assert words == [f"word{number}" for number in range(len(words))]
    assert len(words) > 40
    assert not (data / "chat_history").exists()


def test_a_terminal_without_a_cursor_gets_the_text_as_it_is(chat: Open) -> None:
    terminal = chat(term="dumb", width=60, height=40)
    terminal.type("markdown", "Enter")
    screen = answered(terminal)
    assert "**bold**" in screen
    assert "\x1b" not in terminal.screen(colours=True)
    terminal.type('"""one', "Enter", 'two"""', "Enter")
    assert r"3: 'one\ntwo'" in answered(terminal, 2)
    terminal.type("C-d")
    assert terminal.wait_for_exit() == 0


def test_tab_completes_commands_files_and_sessions(chat: Open, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("one\ntwo\n")
    terminal = chat(width=200)
    terminal.type("/dr", "Tab", "Enter")
    terminal.wait_for("underlined")
    terminal.type(f"/file {tmp_path}/no", "Tab", "Enter")
    terminal.wait_for("notes.txt: 2 lines go with the next message")
    terminal.type("what is this", "Enter")
    assert r"1: 'what is this\n\nnotes.txt:\n```txt\none\ntwo\n```'" in answered(terminal)
    terminal.type("/save first", "Enter")
    terminal.wait_for("saved as")
    terminal.type("/clear", "Enter", "/save fi", "Tab", "Enter")
    terminal.wait_for("Session first exists. Replace it?")
    terminal.type("n", "Enter")
    terminal.type("/bye", "Enter")
    assert terminal.wait_for_exit() == 0


def test_typed_messages_are_kept_for_the_next_chat_and_private(chat: Open, data: Path) -> None:
    first = chat()
    first.type("hello", "Enter")
    answered(first)
    first.type("C-d")
    first.wait_for_exit()
    assert stat.S_IMODE((data / "chat_history").stat().st_mode) == 0o600
    second = chat()
    second.type("Up", "Enter")
    assert "1: 'hello'" in answered(second)


def test_a_second_process_does_not_open_the_same_session(chat: Open) -> None:
    chat("--session", "work")
    second = chat("--session", "work", ready="rest-local: error:")
    assert "open in another process" in " ".join(second.screen().split())
    assert second.wait_for_exit() == 1


def test_output_into_a_pipe_is_plain_and_the_prompt_stays_at_the_terminal(data: Path, tmp_path: Path) -> None:
    chat = f"{shlex.join([sys.executable, str(PROGRAM)])} chat -m model.gguf > {tmp_path}/out"
    given = {"REST_LOCAL_DATA": str(data)}
    with Terminal(["sh", "-c", chat], env=given) as terminal:
        terminal.wait_until(lambda screen: screen.splitlines()[-1:] == [">"], "prompt")
        terminal.type("**bold**", "Enter")
        answered(terminal)
        terminal.type("C-d")
        assert terminal.wait_for_exit() == 0
    assert (tmp_path / "out").read_text() == "1: '**bold**'\n"
