"""`rest-local completion`: print the script that completes command lines in bash, zsh and fish, and offer the values.

The script runs this program for each completion, so nothing heavy is imported here: directories are listed, no file is
opened, and the configuration is not read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from rest_local.errors import RestLocalError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

PROGRAM = "rest-local"
VARIABLE = "_REST_LOCAL_COMPLETE"
SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script that completes command lines in a shell.

    bash reads it from ~/.local/share/bash-completion/completions/rest-local, zsh from a file _rest-local in a folder of
    $fpath, and fish from ~/.config/fish/completions/rest-local.fish.
    """
    from click.shell_completion import get_completion_class

    cli = click.get_current_context().find_root().command
    script = get_completion_class(shell)
    assert script is not None
    click.echo(script(cli, {}, PROGRAM, VARIABLE).source())


def answer(command: click.Command) -> int:
    """Answer the script of a shell, which has set VARIABLE, and return the exit code. An error offers nothing."""
    from click.shell_completion import shell_complete

    try:
        return shell_complete(command, {}, PROGRAM, VARIABLE, os.environ[VARIABLE])
    except (OSError, RestLocalError):
        return 1


def starting(names: Iterable[str], incomplete: str) -> list[CompletionItem[str]]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]


def paths(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def _is_path(text: str) -> bool:
    return os.sep in text or text.startswith("~")


def datastores(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Offer the names of datastores, or paths."""
    from rest_local.paths import datastores_home

    found = [] if _is_path(incomplete) else starting(_folders(str(datastores_home())), incomplete)
    return found or paths(context, parameter, incomplete)


def histories(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    from rest_local.paths import data_dir

    return starting(_folders(os.path.join(data_dir(), "history")), incomplete)


def models(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Offer the models on the disk by name, the GGUF files of this folder, or paths."""
    from rest_local.catalog.stores import names

    found = names()
    if not _is_path(incomplete):
        found += [name for name in os.listdir(".") if name.lower().endswith(".gguf")]
    return starting(found, incomplete) or paths(context, parameter, incomplete)


def _folders(place: str) -> list[str]:
    """List the folders in a place, without hidden ones. The list is empty if the place cannot be read."""
    try:
        with os.scandir(place) as entries:
            return [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    except OSError:
        return []
