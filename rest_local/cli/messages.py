"""Lines on stderr that are not the answer, in the words of the command line.

Messages of the library name parameters of the Python API in backticks; `in_options` writes the option in their place.
"""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from typing import TextIO

import click

from rest_local.errors import RestLocalError, printable

OPTIONS = {
    "again": "--again",
    "cells": "--cells",
    "data": "--data",
    "exact": "--exact",
    "exclude": "--exclude",
    "flash_attention": "--flash-attn",
    "include": "--include",
    "jobs": "--jobs",
    "max_tokens": "--tokens",
    "memory": "--memory",
    "missing=True": "--missing",
    "mmproj": "--mmproj",
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
