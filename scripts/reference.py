"""Write docs/CLI.md from the commands themselves (`make docs`).

    python scripts/reference.py [FILE]

It is built from the declared options and not from the rendered help, whose layout changes with the version of click. A
test compares the file with what this writes.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from rest_local.cli.main import cli
from rest_local.cli.options import SECTIONS, load_options
from rest_local.cli.sections import section_of
from rest_local.cli.settings import ENVIRONMENT

HEAD = f"""# Command line

Written by `make docs` from the commands themselves; a test compares. Where a command has many options, `--help` shows
those that people use most, and `--help-all` all of them. Each option can be set in the environment (`--top-k` is
`{ENVIRONMENT}_TOP_K`) and in the [configuration file](howto/configure.md) (`top-k`); what is given on the command line
wins. This does not hold for options that delete without asking. `{ENVIRONMENT}_HISTORY=0` is `--no-history`.

| exit code | |
|---|---|
| 0 | done |
| 1 | refused or failed at run time, also for a missing file: one line on stderr says what to do |
| 1 without a line | the output pipe was closed |
| 2 | wrong usage, as far as the command line alone shows it |
| 130 | interrupted; the text so far was printed. A second Ctrl-C ends the process at once |
| 143 | a batch that SIGTERM ended |

Bytes of a prompt that are not UTF-8 are replaced, with one warning. `NO_COLOR` is respected.
"""


LOADING = """## Loading a model

Every command that loads a model takes these as well. Their names are llama.cpp's. Several values of one option in the
environment are separated by blanks (files of `--lora` as in `PATH`).
"""


def reference() -> str:
    """Return docs/CLI.md."""
    return "\n".join([HEAD, *_document(cli, "rest-local", None), LOADING, *_load_options()])


def _load_options() -> Iterator[str]:
    @click.command()
    @load_options
    def command(load: object) -> None:
        raise AssertionError("only its options are wanted")

    yield from _table([option for option in command.params if isinstance(option, click.Option)])


def _table(options: Sequence[click.Option]) -> Iterator[str]:
    yield "| option | default | |\n|---|---|---|"
    yield "\n".join(map(_row, options)) + "\n"


def _document(command: click.Command, path: str, parent: click.Context | None) -> Iterator[str]:
    context = click.Context(command, info_name=path.rpartition(" ")[2], parent=parent)
    yield f"## {path}\n"
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        lines = [f"    {line}" for line in paragraph.splitlines()[1:]] if is_block(paragraph) else [paragraph]
        yield "\n".join(lines) + "\n"
    options = [option for option in command.params if isinstance(option, click.Option)]
    own = [option for option in options if section_of(option) not in SECTIONS]
    yield f"    {path} {usage(command)}".rstrip() + "\n"
    if own:
        yield from _table(own)
    if len(own) < len(options):
        yield "And those of [loading a model](#loading-a-model).\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if child is not None:
                yield from _document(child, f"{path} {name}", context)


def usage(command: click.Command) -> str:
    """Return what follows the name of a command: [OPTIONS] PATH... and the like."""
    options = ["[OPTIONS]"] if any(isinstance(option, click.Option) for option in command.params) else []
    arguments = [_placeholder(argument) for argument in command.params if isinstance(argument, click.Argument)]
    return " ".join([*options, *arguments, *(["COMMAND"] if isinstance(command, click.Group) else [])])


def _placeholder(argument: click.Argument) -> str:
    name = argument.metavar or (argument.name or "").upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _row(option: click.Option) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    value = f" `{value_of(option)}`" if value_of(option) else ""
    default = f"`{default_of(option)}`" if option.show_default else ""
    cells = (text.replace("|", "\\|") for text in (names + value, default, option.help or ""))
    return f"| {' | '.join(cells)} |"


def value_of(option: click.Option) -> str:
    """Return what follows the name of an option, or an empty string for a flag."""
    if option.is_flag:
        return ""
    if isinstance(option.type, click.Choice) and not option.metavar:
        return "|".join(map(str, option.type.choices))
    return option.metavar or ""


def default_of(option: click.Option) -> str:
    """Return the default as it is written on a command line: --mmap, 40."""
    if option.is_flag and option.secondary_opts:
        return str(option.opts[0] if option.default else option.secondary_opts[0])
    return str(option.default)


def is_block(paragraph: str) -> bool:
    """Return True if a paragraph of a help text keeps its lines. Click's mark for that is the first line."""
    return paragraph.startswith("\b\n")


if __name__ == "__main__":
    page = Path(*sys.argv[1:]) if sys.argv[1:] else Path(__file__).parents[1] / "docs" / "CLI.md"
    page.write_text(reference(), encoding="utf-8", newline="")
