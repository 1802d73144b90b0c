"""Help in sections: an option may name the one it belongs to, and the command's help lists them in that order. Those
that few people need are left out of `--help`, and are in `--help-all`.

`Help` lays it out for narrow and wide terminals. A `SummaryGroup` shows whole summaries of its commands, and names the
nearest one to a name that is none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from rest_local.cli import completion

WIDEST = 100  # columns of help: longer lines are hard to read
_HYPHEN = "\N{NON-BREAKING HYPHEN}"  # while lines are broken
OPTIONS = "Options"  # the section of options that name none
_ALL = "rest_local.help_all"
_COLUMN = 30  # columns for names at most, a third of a narrow terminal
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Help(click.HelpFormatter):
    """Click's layout, with a column of names that leaves a narrow terminal enough for the text, and without line breaks
    inside of --context-shift.
    """

    def write_text(self, text: str) -> None:
        super().write_text(text.replace("-", _HYPHEN))

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = _COLUMN, col_spacing: int = 2) -> None:
        """Write rows of a name and its text; a name that is too long gets a line of its own."""
        unbroken = [(name, text.replace("-", _HYPHEN)) for name, text in rows]
        super().write_dl(unbroken, min(col_max, self.width // 3), col_spacing)

    def getvalue(self) -> str:
        return super().getvalue().replace(_HYPHEN, "-")


class HelpContext(click.Context):
    """A context whose help is laid out by `Help`."""

    formatter_class = Help

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.parent is None and self.max_content_width is None:
            self.max_content_width = WIDEST


class SummaryGroup(click.Group):
    """A group that shows the first sentence of each command whole; click cuts it to the width of the terminal.

    first   the commands that people use most: the others have a heading of their own
    also    names that people may try, and what they mean here
    """

    context_class = HelpContext

    def __init__(
        self, *arguments: Any, first: Sequence[str] = (), also: Mapping[str, str] | None = None, **attributes: Any
    ) -> None:
        super().__init__(*arguments, **attributes)
        self._first, self._also = first, also or {}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names = self.list_commands(ctx)
        others = [name for name in names if name not in self._first] if self._first else []
        for title, shown in (("Commands", self._first or names), ("More commands", others)):
            commands = [(name, self.get_command(ctx, name)) for name in shown]
            rows = [(name, summary(command)) for name, command in commands if command and not command.hidden]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's method. Raises click.UsageError with the nearest command in place of one that does not exist."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-") and not ctx.resilient_parsing:
            from difflib import get_close_matches

            near = [self._also[name]] if name in self._also else get_close_matches(name, self.list_commands(ctx), 1)
            raise click.UsageError(f"No such command {name!r}" + (f" (did you mean {near[0]!r}?)" if near else ""), ctx)
        return super().resolve_command(ctx, args)


def summary(command: click.Command) -> str:
    return command.get_short_help_str(limit=1000)


class SectionOption(click.Option):
    """An option that is listed under `section`. `rare`: not in `--help`."""

    def __init__(self, *arguments: Any, section: str, rare: bool, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.section, self.rare = section, rare


def in_section(section: str, rare: bool = False) -> Callable[..., Decorator]:
    """What declares the options of a section (`option`). `rare`: unless one says otherwise."""
    return functools.partial(option, section=section, rare=rare)


def option(
    names: str,
    help: str,
    *,
    to: str = "",
    section: str = OPTIONS,
    rare: bool = False,
    configurable: bool = True,
    **attributes: Any,
) -> Decorator:
    """`click.option`, declared as help shows it: `-n --tokens N`; without a value it is a flag.

    A FILE is a path, N a number from 1 on, unless `type` says otherwise. A default is shown. `to`: the parameter;
    `configurable`: whether the environment and the configuration set it; other `attributes` are click's.
    """
    *flags, value = names.split()
    if value.startswith("-"):
        flags.append(value)
        if "type" not in attributes:
            attributes["is_flag"] = True
    else:
        attributes |= {"metavar": value, "type": attributes.get("type", _TYPES.get(value))}
        attributes.setdefault("shell_complete", _COMPLETIONS.get(value))
    attributes.setdefault("show_default", attributes.get("default") is not None or None)
    declared = (*flags, *filter(None, [to]))
    return click.option(
        *declared,
        cls=SectionOption,
        section=section,
        rare=rare,
        allow_from_autoenv=configurable,
        help=help,
        **attributes,
    )


def with_options(options: Sequence[Decorator], command: Callable[..., Any]) -> Callable[..., Any]:
    """Add options to a command, listed in this order."""
    for declared in reversed(options):
        command = declared(command)
    return command


_TYPES = {"FILE": click.Path(path_type=Path), "N": click.IntRange(min=1)}
_COMPLETIONS = {"MODEL": completion.models, "GGUF": completion.models, "DATASTORE": completion.datastores}
rare_option = in_section(OPTIONS, rare=True)


class SectionedCommand(click.Command):
    """A command whose help lists its own options first, then those of each section. `--help-all` lists rare ones too,
    if it has any.
    """

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """All parameters, those for help at the end."""
        found = super().get_params(ctx)
        n_rare = sum(map(is_rare, found))
        if not n_rare:
            return found
        if self._help_all is None:
            self._help_all = click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_show_all,
                help=f"Show this message with {n_rare} more options.",
            )
        return [*found, self._help_all]

    _help_all: click.Option | None = None  # one object: click compares them

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {OPTIONS: []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None and (_ALL in ctx.meta or not is_rare(parameter)):
                sections.setdefault(section_of(parameter), []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _show_all(ctx: click.Context, option: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def is_rare(parameter: click.Parameter) -> bool:
    """Whether only `--help-all` shows it."""
    return isinstance(parameter, SectionOption) and parameter.rare


def section_of(parameter: click.Parameter) -> str:
    return parameter.section if isinstance(parameter, SectionOption) else OPTIONS
