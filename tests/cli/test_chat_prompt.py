"""What is typed: quotes, lines without a cursor, the file of typed messages, and a keyboard that is quiet meanwhile."""

import os
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rest_local.cli import interrupt
from rest_local.cli.chat import prompt
from rest_local.cli.chat.prompt import quiet_keyboard, unquoted


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("hello", "hello"),
        ("  indented\n    more\n", "  indented\n    more"),
        ('"""\none\n  two\n"""', "one\n  two"),
        ('""" one """', " one "),
        ('say """this""" twice', 'say """this""" twice'),
        ('""""""', ""),
        ('"""', '"""'),
    ],
)
def test_quotes_around_a_message_are_no_part_of_it(typed: str, message: str) -> None:
    assert unquoted(typed) == message


def test_a_history_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REST_LOCAL_DATA", str(tmp_path))
    (tmp_path / "chat_history").mkdir()
    prompt._history(keep=True).append_string("hello")
    assert "what you type is not kept" in capsys.readouterr().err


@pytest.fixture
def keyboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Yield the descriptor of a terminal that is the standard input, with this process in its foreground."""
    master, slave = os.openpty()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True, fileno=lambda: slave))
    monkeypatch.setattr(os, "tcgetpgrp", lambda descriptor: os.getpgrp())
    yield slave
    os.close(master)
    os.close(slave)


def echoes(terminal: int) -> bool:
    return bool(termios.tcgetattr(terminal)[3] & termios.ECHO)


def test_the_keyboard_is_quiet_meanwhile_and_put_back(keyboard: int) -> None:
    assert echoes(keyboard)
    with quiet_keyboard():
        assert not echoes(keyboard)
        (put_back,) = interrupt.at_end
        put_back()  # A second interrupt does this.
        assert echoes(keyboard)
    assert echoes(keyboard)
    with pytest.raises(KeyboardInterrupt), quiet_keyboard():
        raise KeyboardInterrupt
    assert echoes(keyboard)
    assert interrupt.at_end == []
