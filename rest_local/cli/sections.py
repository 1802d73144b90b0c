"""Help in sections: an option may name the one it belongs to, and the command's help lists them in that order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


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
            record = parameter.get_help_record(ctx)
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
