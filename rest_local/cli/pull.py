"""`rest-local pull`: a model from the hub to the disk, with progress; and the question where -m names one of a hub."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rest_local.catalog.quantization import in_bytes
from rest_local.cli import completion
from rest_local.cli.options import json_option
from rest_local.errors import HubError, ModelNotFound, ModelNotHere

if TYPE_CHECKING:
    from rest_local.catalog.hub import Choice, Hub, Repository


@click.command()
@click.argument("name", metavar="USER/REPO[:QUANT]", shell_complete=completion.repositories)
@click.option("--list", "list_", is_flag=True, allow_from_autoenv=False, help="Show what there is; download nothing.")
@json_option
def pull(name: str, list_: bool, as_json: bool) -> None:
    """Download a model from the Hugging Face Hub, and print its path.

    QUANT is a quantization (Q4_K_M) or the name of a file, also of a projector for images. Without it the usual one is
    taken, with about 5 bits a weight. A download that was interrupted goes on where it stopped, and every file is
    compared with its checksum.

    The files go to the cache of huggingface_hub, which other programs share. HF_TOKEN, HF_HOME, HF_ENDPOINT and
    HF_HUB_OFFLINE have their usual meaning.
    """
    from rest_local.catalog.hub import Hub, parsed

    hub, wanted = Hub(), parsed(name)
    if list_:
        return _list(hub, hub.repository(wanted.repo), as_json)
    try:
        repository = hub.repository(wanted.repo)
    except HubError as error:
        path = _here_already(name, error)
        return _done(name, path, 0, as_json)
    choice, why = repository.choose(wanted.label)
    size = hub.missing(repository, choice)
    if not as_json:
        _announce(repository, choice, why, size)
    path = download(hub, repository, choice, quiet=as_json)
    return _done(f"{wanted.repo}:{choice.label}", path, size, as_json)


def _here_already(name: str, error: HubError) -> Path:
    """The file of that name on the disk, where the hub cannot be asked; else the error."""
    from rest_local.catalog.find import find_model

    try:
        path = find_model(name).path
    except ModelNotFound:
        raise error from None
    click.echo(f"{name} is on the disk already; {error.cause}", err=True)
    return path


def _announce(repository: Repository, choice: Choice, why: str, size: int) -> None:
    parts = f" in {len(choice.files)} files" if len(choice.files) > 1 else ""
    state = "is here already" if not size else in_bytes(choice.size) + parts
    if 0 < size < choice.size:
        state += f", of which {in_bytes(choice.size - size)} are here"
    click.echo(f"{repository.name}:{choice.label}: {state}" + (f" ({why})" if why else ""), err=True)
    others = [f"{each.label} {in_bytes(each.size)}" for each in repository.choices if each is not choice]
    if why and others:
        click.echo(f"There are also: {', '.join(others)}", err=True)
    if repository.projectors and choice not in repository.projectors:
        seeing = repository.projectors[0].files[0].name
        click.echo(f"For images: rest-local pull {repository.name}:{seeing}", err=True)


def _done(name: str, path: Path, size: int, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"name": name, "path": str(path), "downloaded": size}))
        return
    from rest_local.catalog.projectors import is_projector_file

    click.echo(str(path))
    if sys.stderr.isatty() and not is_projector_file(path.name):
        click.echo(f"Use it: rest-local chat -m {name}", err=True)


def _list(hub: Hub, repository: Repository, as_json: bool) -> None:
    rows = [
        {
            "name": f"{repository.name}:{choice.label}",
            "bytes": choice.size,
            "files": [file.name for file in choice.files],
            "missing": hub.missing(repository, choice),
        }
        for choice in repository.choices
    ]
    if as_json:
        click.echo(json.dumps(rows))
        return
    width = max(len(choice.label) for choice in repository.choices)
    for choice, row in zip(repository.choices, rows, strict=True):
        here = "" if row["missing"] == choice.size else "  partly here" if row["missing"] else "  here"
        click.echo(f"{choice.label:<{width}}  {in_bytes(choice.size):>8}  {choice.files[0].name}{here}")


def offer(error: ModelNotHere) -> Path:
    """Ask whether to download the model that is not here, and do it. Raises the error where the answer is no."""
    from rest_local.catalog.hub import Hub, parsed

    hub, wanted = Hub(), parsed(error.name)
    repository = hub.repository(wanted.repo)
    choice, _ = repository.choose(wanted.label)
    size = hub.missing(repository, choice)
    named = f"{wanted.repo}:{choice.label}"
    if not click.confirm(f"{named} is not on this machine. Download it ({in_bytes(size)})?", default=True, err=True):
        raise error
    return download(hub, repository, choice)


def download(hub: Hub, repository: Repository, choice: Choice, quiet: bool = False) -> Path:
    """Download with a bar on stderr where that is a terminal. After Ctrl-C it says that nothing is lost."""
    try:
        with _bar(quiet) as (progress, notice):
            return hub.download(repository, choice, progress, notice)
    except KeyboardInterrupt:
        left = hub.missing(repository, choice)
        kept = f"{in_bytes(choice.size - left)} of {in_bytes(choice.size)} are kept"
        click.echo(f"rest-local: {kept}; the same command goes on there", err=True)
        raise


@contextmanager
def _bar(quiet: bool) -> Iterator[tuple[Callable[[int, int], None], Callable[[str], None]]]:
    """What moves the bar, and what shows a line above it. Nothing moves where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(compact=True))
    with Progress(
        TextColumn("{task.description}"), *columns, console=console, transient=True,
        disable=quiet or not console.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task("", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, description="checking" if done == total else "")

        yield progress, lambda text: None if quiet else bar.console.print(f"rest-local: {text}", markup=False)
