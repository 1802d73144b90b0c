"""`rest-local bench lookup`: the time of a lookup in a datastore."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from rest_local.cli import completion, inputs
from rest_local.cli.bench.common import bench
from rest_local.cli.options import json_option


@bench.command()
@click.option(
    "--tokens", type=click.IntRange(min=1000), default=20_000_000, show_default=True, help="Size of the text."
)
@click.option("--queries", type=click.IntRange(min=1), default=2000, show_default=True, help="Number of contexts.")
@click.option(
    "--segments",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Compare with the same text in N segments.",
)
@click.option("--cold", is_flag=True, help="Also drop the files from the page cache before each lookup.")
@click.option(
    "--model",
    metavar="GGUF",
    allow_from_autoenv=False,
    shell_complete=completion.models,
    help="Tokenize Python sources of this machine with this vocabulary. Default: a synthetic text.",
)
@click.option(
    "--directory",
    metavar="DIR",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Measure the datastore in this directory, and build none.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the text and the contexts.")
@json_option
def lookup(as_json: bool, model: str | None, directory: Path | None, **options: Any) -> None:
    """Measure lookups: build a datastore in a temporary directory and search it.

    Without other load, for figures that can be compared: times include whatever else the machine does.
    """
    from rest_local.bench.lookup import Choice, measure

    path = model and str(inputs.model_path(model))
    report = measure(Choice(model=path, datastore=directory, **options))
    if not as_json:
        for key, value in report.items():
            click.echo(f"{key:<20} {value}")
    else:
        click.echo(json.dumps(report))
