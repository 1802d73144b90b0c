"""The group of `rest-local bench`."""

from __future__ import annotations

import click

from rest_local.cli.sections import SummaryGroup


@click.group(cls=SummaryGroup)
def bench() -> None:
    """Measure drafting on recorded answers."""
