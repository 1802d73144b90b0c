"""Manual pages of the commands, made from the commands themselves: `rest_local.cli.reference --man FOLDER` writes them.

One page for the program and one for each command; a command with subcommands has them on its page. What a page says
beyond the declared options is in this module. Pages name no version and no date, so they change with the options only.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence

import click

from rest_local.cli.load_options import SECTIONS
from rest_local.cli.main import cli
from rest_local.cli.reference import default_of, is_block, usage, value_of
from rest_local.cli.sections import section_of, summary
from rest_local.cli.settings import ENVIRONMENT

PROGRAM = "rest-local"
_SPECIAL = {"\\": "\\e", "-": "\\-", "'": "\\(aq", "`": "\\(ga", "^": "\\(ha", "~": "\\(ti", '"': "\\(dq"}

ENVIRONMENT_TEXT = (
    f"Every option can be set in the environment: --top-k is {ENVIRONMENT}_TOP_K. Those that delete without asking "
    f"have no variable. {ENVIRONMENT}_CONFIG names another configuration file, and {ENVIRONMENT}_CACHE, "
    f"{ENVIRONMENT}_DATA and {ENVIRONMENT}_DATASTORES name other directories."
)
FILES_TEXT = (
    "`rest-local config path` prints where the configuration is: config.toml in the user's configuration directory "
    "(~/.config/rest-local on Linux). It holds options by their long names, without the dashes."
)
EXIT_TEXT = {
    "0": "Done.",
    "1": "Refused or failed at run time; also, without a message, when the output pipe is closed.",
    "2": "Wrong usage, as far as the command line alone shows it.",
    "130": "Interrupted.",
    "143": "A batch that SIGTERM ended.",
}


def pages() -> dict[str, str]:
    """The pages by file name: rest-local.1, rest-local-generate.1 and so on."""
    context = click.Context(cli, info_name=PROGRAM)
    made = {f"{PROGRAM}.1": _page(_program(context))}
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        if command is not None and not command.hidden:
            made[f"{PROGRAM}-{name}.1"] = _page(_command(command, name, context))
    return made


def escape(text: str) -> str:
    """Text as roff prints it, whatever it holds, for the middle of a line."""
    return "".join(_SPECIAL.get(c, c if c.isascii() else f"\\[u{ord(c):04X}]") for c in text)


def line(text: str) -> str:
    """A line of text that is no request, although it may begin with a dot. `this` is set in bold."""
    parts = re.split(r"`([^`]+)`", " ".join(text.split()))
    escaped = "".join(f"\\fB{escape(part)}\\fR" if n % 2 else escape(part) for n, part in enumerate(parts))
    return f"\\&{escaped}" if escaped.startswith(".") else escaped


def _page(lines: Iterator[str]) -> str:
    return "\n".join(lines) + "\n"


def _program(context: click.Context) -> Iterator[str]:
    yield from _head(PROGRAM, cli)
    yield from _synopsis(cli, PROGRAM)
    yield from _description(cli)
    yield ".SH COMMANDS"
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        if command is not None and not command.hidden:
            yield from _item(f"\\fB{escape(f'{PROGRAM}-{name}')}\\fR(1)", summary(command))
    yield ".SH LOADING A MODEL"
    yield line("Every command that loads a model takes these options as well. Their names are llama.cpp's.")
    loading = cli.get_command(context, "generate")
    assert loading is not None
    for section in SECTIONS:
        yield f".SS {escape(section)}"
        yield from _options([option for option in _declared(loading) if section_of(option) == section])
    yield ".SH ENVIRONMENT"
    yield line(ENVIRONMENT_TEXT)
    yield ".SH FILES"
    yield line(FILES_TEXT)
    yield ".SH EXIT STATUS"
    for code, meaning in EXIT_TEXT.items():
        yield from _item(f"\\fB{code}\\fR", meaning)


def _command(command: click.Command, name: str, context: click.Context) -> Iterator[str]:
    page = f"{PROGRAM}-{name}"
    yield from _head(page, command)
    yield from _synopsis(command, f"{PROGRAM} {name}")
    yield from _description(command)
    yield from _sections(command, ".SH")
    if isinstance(command, click.Group):
        yield ".SH COMMANDS"
        child_context = click.Context(command, info_name=name, parent=context)
        for child_name in command.list_commands(child_context):
            child = command.get_command(child_context, child_name)
            if child is not None and not child.hidden:
                yield f".SS {escape(f'{PROGRAM} {name} {child_name}')} {escape(usage(child))}"
                yield from _paragraphs(child)
                yield from _options(_declared(child))
    yield ".SH SEE ALSO"
    yield f"\\fB{escape(PROGRAM)}\\fR(1)"


def _head(page: str, command: click.Command) -> Iterator[str]:
    yield '.\\" Written by `make docs` from the commands themselves; a test compares.'
    yield f'.TH {escape(page.upper())} 1 "" "{escape(PROGRAM)}" "{escape(PROGRAM)} manual"'
    yield ".SH NAME"
    yield f"{escape(page)} \\- {line(summary(command).rstrip('.'))}"


def _synopsis(command: click.Command, path: str) -> Iterator[str]:
    yield ".SH SYNOPSIS"
    yield f"\\fB{escape(path)}\\fR {escape(usage(command))}".rstrip()


def _description(command: click.Command) -> Iterator[str]:
    yield ".SH DESCRIPTION"
    yield from _paragraphs(command)


def _paragraphs(command: click.Command) -> Iterator[str]:
    """The help text; a paragraph after \\b keeps its lines."""
    for number, paragraph in enumerate(inspect.cleandoc(command.help or "").split("\n\n")):
        if number:
            yield ".PP"
        if is_block(paragraph):
            yield ".nf"
            yield from (f"\\&{escape(text)}" for text in paragraph.splitlines()[1:])
            yield ".fi"
        else:
            yield line(paragraph)


def _sections(command: click.Command, request: str) -> Iterator[str]:
    """The options by section; those of loading a model are on the page of the program."""
    options = _declared(command)
    titles = dict.fromkeys(section_of(option) for option in options)
    for title in sorted(titles, key=lambda title: title != "Options"):  # a command's own first, as in --help
        if title not in SECTIONS:
            yield f"{request} {escape(title.upper())}"
            yield from _options([option for option in options if section_of(option) == title])
    if any(title in SECTIONS for title in titles):
        yield f"{request} LOADING A MODEL"
        yield f"The options of loading a model are in \\fB{escape(PROGRAM)}\\fR(1)."


def _declared(command: click.Command) -> list[click.Option]:
    return [option for option in command.params if isinstance(option, click.Option) and not option.hidden]


def _options(options: Sequence[click.Option]) -> Iterator[str]:
    for option in options:
        names = ", ".join(f"\\fB{escape(name)}\\fR" for name in (*option.opts, *option.secondary_opts))
        value = value_of(option)
        text = option.help or ""
        if option.show_default:
            text += f" Default: {default_of(option)}."
        yield from _item(f"{names} \\fI{escape(value)}\\fR" if value else names, text)


def _item(tag: str, text: str) -> Iterator[str]:
    yield ".TP"
    yield tag
    yield line(text)
