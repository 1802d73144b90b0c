"""`rest-local bench report`: the results of a folder as a page and as a Markdown document."""

from __future__ import annotations

from pathlib import Path

import click

from rest_local.cli import completion
from rest_local.cli.bench.common import bench
from rest_local.cli.messages import say, warn

PAGE = "report.html"  # in the folder, without --html and --markdown


@bench.command()
@click.argument(
    "folder",
    metavar="DIR",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    shell_complete=completion.paths,
)
@click.option(
    "--html",
    "page",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    shell_complete=completion.paths,
    help=f"Write one HTML page with everything in it. Default without --markdown: DIR/{PAGE}.",
)
@click.option(
    "--markdown",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    shell_complete=completion.paths,
    help="Write a Markdown document, and its figures as SVG files into DIR.",
)
def report(folder: Path, page: Path | None, markdown: Path | None) -> None:
    """Show all results of the folder DIR, which the other commands of `bench` wrote with --out.

    A file that is no usable result is named with its reason and left out. Figures need matplotlib:
    pip install 'rest-local[report]'.
    """
    from rest_local.bench.report.writing import make, write_markdown, write_page

    made = make(folder)
    for name, reason in made.left_out:
        warn(f"{name} is left out: {reason}")
    if made.figures:
        warn(f"tables only: {made.figures}")
    if page is None and markdown is None:
        page = folder / PAGE
    if page is not None:
        write_page(made, page)
        say(f"report: {page}")
    if markdown is not None:
        figures = write_markdown(made, markdown, folder)
        say(f"report: {markdown}" + (f" with {len(figures)} figures in {folder}" if figures else ""))
