"""Shows what the library logs as a warning (a datastore that failed while it was read) as one of the command's own.

llama.cpp's log is not shown: it warns of much that is normal. What takes seconds is announced, to a terminal only. Not
in `messages`, because importing `logging` would cost --help a tenth of its time.
"""

from __future__ import annotations

import logging
import sys

import click

from rest_local.cli.messages import warn

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
