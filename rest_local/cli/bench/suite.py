"""`rest-local bench suite`: every measurement, then the report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from rest_local.cli import completion, inputs
from rest_local.cli.bench.common import bench, data_option, model_option
from rest_local.cli.bench.report import PAGE
from rest_local.cli.messages import say
from rest_local.errors import RestLocalError, printable

if TYPE_CHECKING:
    from rest_local.bench.suite.parts import Part
    from rest_local.bench.suite.record import Outcome


@bench.command()
@click.argument(
    "folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False), shell_complete=completion.paths
)
@click.option("--quick", is_flag=True, help="A first look, on fewer prompts: minutes in place of half an hour.")
@click.option("--again", is_flag=True, help="Measure anew what another version or other options have measured.")
@data_option
@model_option
@click.option(
    "--llama-server",
    "server",
    metavar="PATH",
    allow_from_autoenv=False,  # of `bench compare` it may be a name on the PATH
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    shell_complete=completion.paths,
    help="llama.cpp's server, to compare with it.",
)
def suite(folder: Path, quick: bool, again: bool, data: Path | None, model: str | None, server: Path | None) -> None:
    """Measure everything that the folder DIR lacks, then write the report DIR/report.html.

    The results of other commands of `bench` in DIR are kept. A run that is interrupted goes on where it stopped when
    the same command is given again. A part that cannot run here is named with its reason.
    """
    from rest_local.bench.suite.parts import Choice, parts
    from rest_local.bench.suite.record import FAILED, Record
    from rest_local.bench.suite.running import check, run

    found = parts(Choice(inputs.model_path(model), model is None, data, server, quick))
    folder.mkdir(parents=True, exist_ok=True)
    record = Record(folder, "rest-local bench suite DIR" + " --quick" * quick, quick=quick)
    check(found, folder, record, quick=quick, again=again)
    try:
        outcomes = run(found, folder, record, quick=quick, begin=_begin, done=_done)
    except KeyboardInterrupt:
        click.echo(err=True)
        say(f"stopped; what is finished is in {folder}, and the same command goes on")
        raise
    _report(folder)
    if failed := [part.name for part, outcome in zip(found, outcomes, strict=True) if outcome.state == FAILED]:
        raise RestLocalError(f"{len(failed)} of {len(found)} parts failed: {', '.join(failed)}; the report says why")


def _begin(part: Part) -> None:
    click.echo(f"{part.name} ...", nl=False)


def _done(part: Part, outcome: Outcome, kept: bool) -> None:
    from rest_local.bench.report.text import duration
    from rest_local.bench.suite.record import MEASURED

    if kept:
        click.echo(f"{part.name}: is there")
    elif outcome.state == MEASURED:
        click.echo(f" {duration(outcome.seconds)}")
    elif part.missing:
        click.echo(printable(f"{part.name}: {outcome.state}: {outcome.reason}"))
    else:
        click.echo(printable(f" {outcome.state} after {duration(outcome.seconds)}: {outcome.reason}"))


def _report(folder: Path) -> None:
    from rest_local.bench.report.writing import make, write_page

    made = make(folder)
    write_page(made, folder / PAGE)
    for name, reason in made.left_out:
        say(f"{name} is not in the report: {reason}")
    say(f"report: {folder / PAGE}" + (f" ({made.figures})" if made.figures else ""))
