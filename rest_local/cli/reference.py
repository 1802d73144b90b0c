"""Writes docs/CLI.md from the commands themselves: `python -m rest_local.cli.reference > docs/CLI.md` (`make docs`).

Built from the declared options and not from the rendered help, whose layout changes with the version of click. A test
compares the file with what this prints.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

from rest_local.cli.main import ENVIRONMENT, cli

HEAD = f"""# Command line

Written by `make docs` from the commands themselves; a test compares. Every option can be set in the environment:
`--top-k` is `{ENVIRONMENT}_TOP_K`, for every command; what is given on the command line wins. (Not those of
`history forget`, which deletes, nor `bench replay --history`: `{ENVIRONMENT}_HISTORY=0` is `--no-history`.) Exit codes:
0 ok, 1 refused at run time, 2 wrong usage, 130 interrupted.
"""


def reference() -> str:
    """Return docs/CLI.md."""
    return "\n".join([HEAD, *_document(cli, "rest-local", None)])


def _document(command: click.Command, path: str, parent: click.Context | None) -> Iterator[str]:
    context = click.Context(command, info_name=path.rpartition(" ")[2], parent=parent)
    yield f"## {path}\n"
    yield inspect.cleandoc(command.help or "").replace("\b\n", "") + "\n"
    rows = [_row(option) for option in command.params if isinstance(option, click.Option)]
    arguments = [_placeholder(argument) for argument in command.params if isinstance(argument, click.Argument)]
    command_word = ["COMMAND"] if isinstance(command, click.Group) else []
    yield f"    {' '.join([path, *(['[OPTIONS]'] if rows else []), *arguments, *command_word])}\n"
    if rows:
        yield "| option | default | |\n|---|---|---|"
        yield "\n".join(rows) + "\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if child is not None:
                yield from _document(child, f"{path} {name}", context)


def _placeholder(argument: click.Argument) -> str:
    name = argument.metavar or (argument.name or "").upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _row(option: click.Option) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    if isinstance(option.type, click.Choice):
        value = "|".join(map(str, option.type.choices))
    else:
        value = "" if option.is_flag else option.metavar or ""
    value = f" `{value}`" if value else ""
    default = f"`{option.default}`" if option.show_default else ""
    cells = (text.replace("|", "\\|") for text in (names + value, default, option.help or ""))
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(reference(), end="")
