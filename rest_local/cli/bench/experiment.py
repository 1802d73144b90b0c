"""`rest-local bench experiment`: one experiment, its result as a file and as tables."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rest_local.bench.experiments.catalog import EXPERIMENTS
from rest_local.cli import completion, inputs
from rest_local.cli.bench.common import bench, data_option, model_option
from rest_local.cli.messages import fitted, say
from rest_local.cli.options import json_option
from rest_local.errors import OptionError

if TYPE_CHECKING:
    from rest_local.bench.report.shapes import Cell, Section, Table

RESULTS = "results"  # the folder without --out
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


def _count(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """A number of tokens: 300000, 300k, 10M."""
    if value is None:
        return None
    found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)([kMG]?)", value)
    tokens = round(float(found[1]) * _UNITS[found[2]]) if found else 0
    if not 1000 <= tokens <= 10**9:
        raise click.BadParameter(f"{value!r} is no number of tokens from 1k to 1G", context, parameter)
    return tokens


@bench.command()
@click.argument("name", required=False, metavar="NAME")
@click.option("--list", "listed", is_flag=True, help="Name the experiments, and what each measures.")
@data_option
@model_option
@click.option(
    "--text",
    "paths",
    multiple=True,
    allow_from_autoenv=False,  # `bench datastore-size` checks its own later
    metavar="PATH",
    shell_complete=completion.paths,
    type=click.Path(path_type=Path, exists=True),
    help="Text for datastores; repeatable. Default: the Python sources of this machine.",
)
@click.option(
    "--tokens",
    metavar="N",
    callback=_count,
    allow_from_autoenv=False,  # `tokens` of other commands is a number
    help="Size of the largest datastore, such as 300k or 100M.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    allow_from_autoenv=False,  # `seed` of other commands may be negative
    help="Of every random choice.",
)
@click.option("--quick", is_flag=True, help="A first look: fewer answers, within seconds.")
@click.option(
    "--out",
    metavar="DIR",
    default=RESULTS,
    show_default=True,
    shell_complete=completion.paths,
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the result and an unfinished run are kept.",
)
@json_option
def experiment(name: str | None, listed: bool, as_json: bool, **options: Any) -> None:
    """Measure one of the experiments of `--list`, and write its result.

    A run that is interrupted goes on where it stopped when the same command is given again.
    """
    if listed:
        click.echo("\n".join(_summaries()))
        return
    if name is None:
        raise click.UsageError("name an experiment, or give --list")
    if name not in EXPERIMENTS:
        raise click.UsageError(f"no experiment {name!r}; there are {', '.join(EXPERIMENTS)}")
    _measure(name, as_json, **options)


def _summaries() -> Iterator[str]:
    from rest_local.bench.experiments.catalog import load

    width = max(map(len, EXPERIMENTS), default=0)
    for name in EXPERIMENTS:
        yield fitted(f"{name:<{width}}  {load(name).SUMMARY}", sys.stdout)


def _measure(
    name: str,
    as_json: bool,
    data: Path | None,
    model: str | None,
    paths: tuple[Path, ...],
    tokens: int | None,
    seed: int,
    quick: bool,
    out: Path,
) -> None:
    import tempfile

    from rest_local.bench.experiments.catalog import load
    from rest_local.bench.experiments.inputs import Inputs
    from rest_local.bench.experiments.running import journal_path, measure, result_path

    with tempfile.TemporaryDirectory(prefix="rest-local-") as folder:
        given = Inputs(
            folder=Path(folder),
            model=None if model is None else inputs.model_path(model),
            data=data,
            text=paths,
            seed=seed,
            quick=quick,
            tokens=tokens,
            tell=say,
        )
        try:
            result = measure(name, given, out, _command(name, data, model, paths, tokens, seed, quick))
        except KeyboardInterrupt:
            if journal_path(out, name).exists():
                say("stopped; the same command goes on with what is left")
            raise
        except NotADirectoryError as error:
            raise OptionError(f"--out {out}: not a folder") from error
    if as_json:
        click.echo(json.dumps(dict(result.data)))
    else:
        click.echo("\n".join(_lines(load(name).section(result))))
        say(f"result: {result_path(out, name)}")


def _command(
    name: str,
    data: Path | None,
    model: str | None,
    paths: tuple[Path, ...],
    tokens: int | None,
    seed: int,
    quick: bool,
) -> str:
    """The command line for the result. Folders are named by what they hold, not by where they are on this machine."""
    words = ["rest-local", "bench", "experiment", name]
    words += [] if data is None else ["--data", "DIR"]
    words += [] if model is None else ["--model", Path(model).name]
    for path in paths:
        words += ["--text", path.name]
    words += [] if tokens is None else ["--tokens", str(tokens)]
    words += ["--seed", str(seed)] if seed else []
    words += ["--quick"] if quick else []
    return shlex.join(words)


def _lines(section: Section) -> Iterator[str]:
    """Title, words and tables, for a terminal."""
    yield section.title
    for paragraph in section.words:
        yield fitted(paragraph, sys.stdout)
    for table in section.tables:
        yield ""
        yield from _table(table)
    for footnote in section.footnotes:
        yield fitted(footnote, sys.stdout)


def _table(table: Table) -> Iterator[str]:
    cells = [[str(column) for column in table.columns], *([_shown(cell) for cell in row] for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    yield table.title
    for row in cells:
        first, *others = (
            f"{cell:<{width}}" if not at else f"{cell:>{width}}"
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(["", first, *others]).rstrip()
    if table.note:
        yield fitted(f"  {table.note}", sys.stdout)


def _shown(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.2f}" if abs(cell) < 10 else f"{cell:.3g}" if abs(cell) < 1000 else f"{cell:,.0f}"
    return f"{cell:,}" if isinstance(cell, int) else cell
