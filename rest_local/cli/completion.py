"""`rest-local completion`: the script that completes command lines in bash, zsh and fish, and what values it offers.

The script asks this program for each completion, so nothing heavy is imported here: directories are listed, no file is
opened, and the configuration is not read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import click
from click.shell_completion import CompletionItem, get_completion_class, shell_complete

PROGRAM = "rest-local"
VARIABLE = "_REST_LOCAL_COMPLETE"  # set by the script, for every completion
SHELLS = ("bash", "zsh", "fish")
_PLACES = {
    "bash": "~/.local/share/bash-completion/completions/rest-local",
    "zsh": "~/.zfunc/_rest-local  # a folder of $fpath",
    "fish": "~/.config/fish/completions/rest-local.fish",
}

Items = list[CompletionItem]  # type: ignore[type-arg]  # older versions of click take no argument


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script that completes command lines in a shell.

    \b
    bash: rest-local completion bash > ~/.local/share/bash-completion/completions/rest-local
    zsh:  rest-local completion zsh > ~/.zfunc/_rest-local     # a folder of $fpath
    fish: rest-local completion fish > ~/.config/fish/completions/rest-local.fish
    """
    from rest_local.cli.main import cli

    script = get_completion_class(shell)
    assert script is not None
    click.echo(script(cli, {}, PROGRAM, VARIABLE).source())


def answer(command: click.Command) -> int | None:
    """Answer the script of a shell and return the exit code; None where no script asks."""
    instruction = os.environ.get(VARIABLE)
    return shell_complete(command, {}, PROGRAM, VARIABLE, instruction) if instruction else None


def _starting(names: Iterable[str], incomplete: str) -> Items:
    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]


def _files(incomplete: str) -> Items:
    """Let the shell complete a path."""
    return [CompletionItem(incomplete, type="file")]


def _is_path(text: str) -> bool:
    return os.sep in text or text.startswith("~")


def datastores(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Names of datastores, or a path."""
    if _is_path(incomplete):
        return _files(incomplete)
    from rest_local.paths import datastores_home

    return _starting(_folders(str(datastores_home())), incomplete) or _files(incomplete)


def histories(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Names of histories."""
    from rest_local.paths import data_dir

    return _starting(_folders(os.path.join(data_dir(), "history")), incomplete)


def models(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """GGUF files of this folder, or a path."""
    if _is_path(incomplete):
        return _files(incomplete)
    found = [name for name in os.listdir(".") if name.lower().endswith(".gguf")]
    return _starting(found, incomplete) or _files(incomplete)


def keys(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Keys of the configuration, with the help of their options."""
    from rest_local.cli.main import cli
    from rest_local.cli.settings import options_by_key

    found = options_by_key(cli)
    return [
        CompletionItem(key, help=(found[key][0].help or "").partition(". ")[0])
        for key in sorted(found)
        if key.startswith(incomplete)
    ]


def values(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """What the option of the key in the same command line takes."""
    from rest_local.cli.main import cli
    from rest_local.cli.settings import options_by_key

    options = options_by_key(cli).get(context.params.get("key") or "", [])
    if not options:
        return []
    if options[0].is_flag:
        return _starting(("true", "false"), incomplete)
    return list(options[0].shell_complete(context, incomplete))


def _folders(place: str) -> list[str]:
    """The folders in a place, without hidden ones; none where the place cannot be read."""
    try:
        with os.scandir(place) as entries:
            return [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    except OSError:
        return []
