"""What the library logs as a warning (a datastore that failed while it was read) is shown as one of the command's own.

llama.cpp's log stays where it is: it warns of much that is normal. Imported when an engine is loaded, not for --help.
"""

from __future__ import annotations

import logging

from rest_local.cli import options

LLAMA = "rest_local.llama"


class Shown(logging.Handler):
    """One line on stderr for each record."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != LLAMA and not record.name.startswith(f"{LLAMA}."):
            options.warn(record.getMessage())


def show_warnings() -> None:
    """Show warnings from now on; again does nothing."""
    logger = logging.getLogger("rest_local")
    if not any(isinstance(handler, Shown) for handler in logger.handlers):
        logger.addHandler(Shown(logging.WARNING))
