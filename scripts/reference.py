"""Write docs/CLI.md and the manual pages in docs/man from the commands themselves (`make docs`).

    python scripts/reference.py [FOLDER]

They are built from the declared options and not from the rendered help, whose layout changes with the version of click.
There is one manual page for the program and one for each command. A command with subcommands has them on its page.
Pages name no version and no date, so they change with the options only. Tests compare the files with what this writes.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from rest_local.cli.main import cli
from rest_local.cli.options import SECTIONS, load_options
from rest_local.cli.sections import section_of, summary
from rest_local.cli.settings import ENVIRONMENT

HEAD = f"""# Command line

Written by `make docs` from the commands themselves; a test compares. Where a command has many options, `--help` shows
those that people use most, and `--help-all` all of them. Each option can be set in the environment (`--top-k` is
`{ENVIRONMENT}_TOP_K`) and in the [configuration file](howto/configure.md) (`top-k`); what is given on the command line
wins. This does not hold for options that delete without asking, and for `--model` and `--history` of `bench replay`,
which mean something else. `{ENVIRONMENT}_HISTORY=0` is `--no-history`.

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
    """Return the pages by file name: rest-local.1, rest-local-generate.1 and so on."""
    context = click.Context(cli, info_name=PROGRAM)
    made = {f"{PROGRAM}.1": _page(_program(context))}
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        if command is not None and not command.hidden:
            made[f"{PROGRAM}-{name}.1"] = _page(_command(command, name, context))
    return made


def escape(text: str) -> str:
    """Escape a text for the middle of a line, so that roff prints it as it is."""
    return "".join(_SPECIAL.get(c, c if c.isascii() else f"\\[u{ord(c):04X}]") for c in text)


def line(text: str) -> str:
    """Return a line of text that is no request, although it may begin with a dot. `this` is set in bold."""
    parts = re.split(r"`([^`]+)`", " ".join(text.split()))
    escaped = "".join(f"\\fB{escape(part)}\\fR" if n % 2 else escape(part) for n, part in enumerate(parts))
    return f"\\&{escaped}" if escaped.startswith(".") else escaped


def _page(lines: Iterator[str]) -> str:
    return "\n".join(lines) + "\n"


def _program(context: click.Context) -> Iterator[str]:
    yield from _head(PROGRAM, PROGRAM, cli)
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
    yield from _head(f"{PROGRAM}-{name}", f"{PROGRAM} {name}", command)
    yield from _sections(command)
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


def _head(page: str, path: str, command: click.Command) -> Iterator[str]:
    yield '.\\" Written by `make docs` from the commands themselves; a test compares.'
    yield f'.TH {escape(page.upper())} 1 "" "{escape(PROGRAM)}" "{escape(PROGRAM)} manual"'
    yield ".SH NAME"
    yield f"{escape(page)} \\- {line(summary(command).rstrip('.'))}"
    yield ".SH SYNOPSIS"
    yield f"\\fB{escape(path)}\\fR {escape(usage(command))}".rstrip()
    yield ".SH DESCRIPTION"
    yield from _paragraphs(command)


def _paragraphs(command: click.Command) -> Iterator[str]:
    """Yield the help text. A paragraph after \b keeps its lines."""
    for number, paragraph in enumerate(inspect.cleandoc(command.help or "").split("\n\n")):
        if number:
            yield ".PP"
        if is_block(paragraph):
            yield ".nf"
            yield from (f"\\&{escape(text)}" for text in paragraph.splitlines()[1:])
            yield ".fi"
        else:
            yield line(paragraph)


def _sections(command: click.Command) -> Iterator[str]:
    """Yield the options by section. Those of loading a model are on the page of the program."""
    options = _declared(command)
    titles = dict.fromkeys(section_of(option) for option in options)
    for title in sorted(titles, key=lambda title: title != "Options"):  # A command's own come first, as in --help.
        if title not in SECTIONS:
            yield f".SH {escape(title.upper())}"
            yield from _options([option for option in options if section_of(option) == title])
    if any(title in SECTIONS for title in titles):
        yield ".SH LOADING A MODEL"
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


def write(folder: Path) -> None:
    """Write CLI.md and the pages in `man`; pages of commands that are gone are removed."""
    made = pages()
    (folder / "man").mkdir(parents=True, exist_ok=True)
    for old in (folder / "man").glob("rest-local*.1"):
        if old.name not in made:
            old.unlink()
    for name, text in made.items():
        (folder / "man" / name).write_text(text, encoding="utf-8", newline="")
    (folder / "CLI.md").write_text(reference(), encoding="utf-8", newline="")


if __name__ == "__main__":
    write(Path(*sys.argv[1:]) if sys.argv[1:] else Path(__file__).parents[1] / "docs")
