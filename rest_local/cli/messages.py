"""Lines on stderr that are not the answer, in the words of the command line.

Messages of the library name parameters of the Python API in backticks; `in_options` writes the option in their place.

`show_warnings` shows what the library logs as a warning (a datastore that failed while it was read) as one of the
command's own. llama.cpp's log is not shown: it warns of much that is normal. What takes seconds is announced, to a
terminal only.
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
import textwrap
from typing import TextIO

import click

from rest_local.errors import RestLocalError, printable

OPTIONS = {
    "cells": "--cells",
    "exact": "--exact",
    "exclude": "--exclude",
    "flash_attention": "--flash-attn",
    "include": "--include",
    "max_tokens": "--tokens",
    "n_ctx": "--ctx",
    "n_gpu_layers": "--gpu-layers",
    "repack=False": "--no-repack",
    "replace": "--replace",
    "rope": "--rope-scaling",
    "slots": "--slots",
}


def in_options(message: str) -> str:
    """A message of the library with options of the command line in the place of the parameters that it names."""
    return re.sub(r"`([\w=]+)`", lambda found: OPTIONS.get(found[1], found[0]), message)


def warn(message: str) -> None:
    """One line on stderr. What it quotes may come from a file: control characters do not reach the terminal."""
    click.echo(f"rest-local: warning: {printable(in_options(message))}", err=True)


def fail(error: RestLocalError) -> str:
    """The line of an error on stderr, where the command goes on. Returns its message."""
    message = in_options(str(error))
    click.echo(f"rest-local: error: {message}", err=True)
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


PROGRESS = "rest_local.tuning.progress"
LLAMA = "rest_local.llama"


class Shown(logging.Handler):
    """One line on stderr for each record."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != LLAMA and not record.name.startswith(f"{LLAMA}."):
            warn(record.getMessage())


class Announced(logging.Handler):
    """One line on stderr for each record, where that is a terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr.isatty():
            click.echo(f"rest-local: {record.getMessage()}", err=True)


def show_warnings() -> None:
    """Show warnings and announcements from now on; again does nothing."""
    logger, progress = logging.getLogger("rest_local"), logging.getLogger(PROGRESS)
    if not any(isinstance(handler, Shown) for handler in logger.handlers):
        logger.addHandler(Shown(logging.WARNING))
        progress.addHandler(Announced(logging.INFO))
        progress.setLevel(logging.INFO)
