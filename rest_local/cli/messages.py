"""Lines on stderr that are not the answer."""

from __future__ import annotations

import click

from rest_local.errors import printable


def warn(message: str) -> None:
    """One line on stderr. What it quotes may come from a file: control characters do not reach the terminal."""
    click.echo(f"rest-local: warning: {printable(message)}", err=True)
