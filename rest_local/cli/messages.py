"""Lines on stderr that are not the answer, in the words of the command line.

Messages of the library name parameters of the Python API in backticks; `errors.in_options` writes the option in their
place.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import TextIO

import click

from rest_local.errors import RestLocalError, in_options, printable


def warn(message: str) -> None:
    """One line on stderr. What it quotes may come from a file: control characters do not reach the terminal."""
    say(f"rest-local: warning: {in_options(message)}")


def counted(number: int, what: str) -> str:
    """Such as "1 answer" or "1,234 answers"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def fail(error: RestLocalError, more: str = "") -> str:
    """The line of an error on stderr, where the command goes on. Returns its message."""
    message = in_options(str(error)) + more
    say(f"rest-local: error: {message}")
    return message


def say(text: str) -> None:
    """One line on stderr about what the command did."""
    click.echo(fitted(printable(text), sys.stderr), err=True)


def fitted(text: str, stream: TextIO) -> str:
    """A line of words, broken between them for the width of a terminal and indented further; for a pipe as it is."""
    if not stream.isatty():
        return text
    indent = text[: len(text) - len(text.lstrip())]
    width = max(shutil.get_terminal_size().columns - 1, 20)
    return textwrap.fill(
        text, width, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False, tabsize=4
    )
