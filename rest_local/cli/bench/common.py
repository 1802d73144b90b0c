"""The group of `rest-local bench`, and the options that several of its commands have."""

from __future__ import annotations

from pathlib import Path

import click

from rest_local.cli import completion
from rest_local.cli.sections import SummaryGroup


@click.group(cls=SummaryGroup)
def bench() -> None:
    """Measure drafting on recorded answers."""


data_option = click.option(
    "--data",
    metavar="DIR",
    allow_from_autoenv=False,  # REST_LOCAL_DATA is where this program keeps its data
    shell_complete=completion.paths,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="The folder of recorded answers, questions and vocabularies.",
)

model_option = click.option(
    "-m", "--model", metavar="MODEL", shell_complete=completion.models, help="A model to run. Default: the demo model."
)
