"""Help in sections: an option may name the one it belongs to, and the command's help lists them in that order.

`Help` lays it out for narrow and wide terminals, and a `SummaryGroup` shows whole summaries of its commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click

WIDEST = 100  # columns of help: longer lines are hard to read
_HYPHEN = "\N{NON-BREAKING HYPHEN}"  # while lines are broken
_COLUMN = 30  # columns for names at most, a third of a narrow terminal


class Help(click.HelpFormatter):
    """Click's layout, with a column of names that leaves a narrow terminal enough for the text, and without line breaks
    inside of --context-shift.
    """

    def write_text(self, text: str) -> None:
        """Write paragraphs."""
        super().write_text(text.replace("-", _HYPHEN))

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = _COLUMN, col_spacing: int = 2) -> None:
        """Write rows of a name and its text; a name that is too long gets a line of its own."""
        unbroken = [(name, text.replace("-", _HYPHEN)) for name, text in rows]
        super().write_dl(unbroken, min(col_max, self.width // 3), col_spacing)

    def getvalue(self) -> str:
        """The text so far."""
        return super().getvalue().replace(_HYPHEN, "-")


class HelpContext(click.Context):
    """A context whose help is laid out by `Help`."""

    formatter_class = Help

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.parent is None and self.max_content_width is None:
            self.max_content_width = WIDEST


class SummaryGroup(click.Group):
    """A group that shows the first sentence of each command whole; click cuts it to the width of the terminal."""

    context_class = HelpContext

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands into the formatter."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        shown = [(name, summary(command)) for name, command in commands if command and not command.hidden]
        if shown:
            with formatter.section("Commands"):
                formatter.write_dl(shown)


def summary(command: click.Command) -> str:
    """The first sentence of a command's help."""
    return command.get_short_help_str(limit=1000)


class SectionOption(click.Option):
    """An option that is listed under `section`."""

    def __init__(self, *arguments: Any, section: str, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.section = section


class SectionedCommand(click.Command):
    """A command whose help lists its own options first, then those of each section."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options into the formatter, a heading for each section."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                sections.setdefault(section_of(parameter), []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def section_of(parameter: click.Parameter) -> str:
    """Return the section of a parameter; "Options" for those that name none."""
    return parameter.section if isinstance(parameter, SectionOption) else "Options"


def in_section(section: str) -> Callable[..., Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """Return `click.option` for options of one section."""

    def option(*names: str, **attributes: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return click.option(*names, cls=SectionOption, section=section, **attributes)

    return option
