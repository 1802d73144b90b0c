"""Declare the options of commands, look up their values, and show help in sections.

An option may name its section. Options that few people need are left out of `--help` and shown by `--help-all`. What
neither the command line nor the environment gives comes from the configuration (`cli.settings`). It is read when the
first option is looked up, so --help does not depend on it.

Click's own variables would be named REST_LOCAL_GENERATE_TOP_K, after the arguments, and its `default_map` holds values
by command. Here one key is for all commands, and depends on the model, so `Context.lookup_default` replaces both.

This module imports only click and the standard library.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from rest_local.cli import completion
from rest_local.cli.settings import MODEL, Settings, variable_of
from rest_local.errors import RestLocalError

WIDEST = 100  # Longer lines of help are hard to read.
OPTIONS = "Options"  # This is the section of options that name none.
UNCONFIGURED = ("config", "completion")  # These commands work whatever is wrong with the file.
_HYPHEN = "\N{NON-BREAKING HYPHEN}"
_NAME_COLUMNS = 30
_ALL, _SETTINGS = "rest_local.help_all", "rest_local.settings"  # The contexts of one command line share these.
_FILES = ("FILE", "FOLDER", "MODEL")  # Options with these metavars name a file without `click.Path`.
PathAndCommand = tuple[tuple[str, ...], click.Command]
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Help(click.HelpFormatter):
    """Click's layout, with room for the text on a narrow terminal, and without breaks at hyphens."""

    def write_text(self, text: str) -> None:
        super().write_text(text.replace("-", _HYPHEN))

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = _NAME_COLUMNS, col_spacing: int = 2) -> None:
        unbroken = [(name, text.replace("-", _HYPHEN)) for name, text in rows]
        super().write_dl(unbroken, min(col_max, self.width // 3), col_spacing)

    def getvalue(self) -> str:
        return super().getvalue().replace(_HYPHEN, "-")


class Context(click.Context):
    """A context that looks up in the configuration what neither the command line nor the environment gave."""

    formatter_class = Help

    def lookup_default(self, name: str, call: bool = True) -> Any:
        """Look a default up in the configuration. `call` is False for --help, which shows the program's own."""
        key = next((option.key for option in options_of(self.command) if option.name == name), None)
        unconfigured = any(name in UNCONFIGURED for name in self.command_path.split())
        if key is None or not call or self.resilient_parsing or unconfigured:
            return None
        found = self.settings.find(key, self.model)
        return found and found.value

    @property
    def settings(self) -> Settings:
        """Return the configuration file, after a check that some command knows each key. Raises ConfigInvalid."""
        if _SETTINGS not in self.meta:
            settings = Settings.load()
            keys = {option.key for option in options_of(self.command)}
            if any(table.keys() - keys or (glob and MODEL in table) for glob, table in settings.tables.items()):
                settings.check_keys(options_by_key(self.find_root().command))
            self.meta[_SETTINGS] = settings
        settings = self.meta[_SETTINGS]
        assert isinstance(settings, Settings)
        return settings

    @property
    def model(self) -> str | None:
        """Return the value of -m for this command line. Click looks up given options first, so a given -m is known."""
        option = next((option for option in options_of(self.command) if option.key == MODEL), None)
        if option is None:
            return None
        found = self.settings.find(MODEL, None)
        model = self.params.get(option.name or "") or option.value_from_envvar(self) or (found and found.value)
        return model if isinstance(model, str) else None


class Option(click.Option):
    """An option that is listed under `section`, and if it is `rare` not in `--help`.

    `key` is its name in the configuration, or None for an option that deletes. `also` has the names that help does not
    list.
    """

    def __init__(
        self, *arguments: Any, section: str, rare: bool, configurable: bool, also: Sequence[str], **attributes: Any
    ) -> None:
        super().__init__(*arguments, **attributes)
        self.section, self.rare, self.also, self.key = section, rare, also, None
        if configurable:
            self.key = next((name for name in self.opts if name.startswith("--")), self.opts[0]).lstrip("-")
            self.envvar = variable_of(self.key)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return click's record without the names in `also`."""
        names, self.opts = self.opts, [name for name in self.opts if name not in self.also]
        try:
            return super().get_help_record(ctx)
        finally:
            self.opts = names

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        """Process a value as click does. Raises ConfigInvalid for a wrong value in the file."""
        if not isinstance(ctx, Context) or ctx.get_parameter_source(self.name or "") != ParameterSource.DEFAULT_MAP:
            return super().process_value(ctx, value)
        try:
            return self.of_file(value, ctx)
        except ValueError as error:
            found = ctx.settings.find(self.key or "", ctx.model)
            raise ctx.settings.wrong(self.key or "", found and found.profile, f"{self.key}: {error}") from error

    def of_file(self, value: Any, ctx: click.Context) -> Any:
        """Convert a value of the file as if it stood on the command line. Raises ValueError with what is wrong."""
        if isinstance(value, dict) or (isinstance(value, list) and not self.multiple):
            raise ValueError(f"takes one value, not a {'list' if isinstance(value, list) else 'table'}")
        texts = [toml_text(one) for one in (value if isinstance(value, list) else [value])]
        if isinstance(self.type, click.Path) or self.metavar in _FILES:  # No shell has replaced `~`.
            texts = [os.path.expanduser(text) for text in texts]
        try:
            return super().process_value(ctx, tuple(texts) if self.multiple else texts[0])
        except click.BadParameter as error:
            raise ValueError(without_range(error.message)) from error
        except RestLocalError as error:
            raise ValueError(str(error)) from error


def toml_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def without_range(message: str) -> str:
    """Shorten a message of click that says "integer range" without the range."""
    return re.sub(r"(integer|float) range$", r"\1", message.rstrip("."))


def options_of(command: click.Command) -> list[Option]:
    return [parameter for parameter in command.params if isinstance(parameter, Option)]


def options_by_key(root: click.Command) -> dict[str, list[Option]]:
    """Return the options of each key in all commands that read the configuration. Loading the commands takes 40 ms."""
    found: dict[str, list[Option]] = {}
    for path, command in commands_below(root):
        for option in options_of(command):
            if option.key is not None and path[:1] and path[0] not in UNCONFIGURED:
                found.setdefault(option.key, []).append(option)
    return found


def commands_below(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[PathAndCommand]:
    """Yield a command and all commands below it, each with the names that lead there."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            if (child := command.get_command(context, name)) is not None:
                yield from commands_below(child, (*path, name))


def in_section(section: str, rare: bool = False) -> Callable[..., Decorator]:
    """Return `option` for one section. Its options are `rare` unless one says otherwise."""
    return functools.partial(option, section=section, rare=rare)


def option(
    names: str,
    help: str,
    *,
    to: str = "",
    section: str = OPTIONS,
    rare: bool = False,
    configurable: bool = True,
    also: str = "",
    **attributes: Any,
) -> Decorator:
    """Declare a click option as help shows it: `-n --tokens N`, or without a value for a flag.

    FILE means a path and N a number from 1 on, unless `type` says otherwise. A default is shown. `to` is the parameter,
    `configurable` whether the environment and the configuration set it, and `also` has further names that people know
    from other programs. Other `attributes` are click's.
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
    attributes |= {"cls": Option, "section": section, "rare": rare, "configurable": configurable, "help": help}
    attributes["also"] = also.split()
    return click.option(*flags, *also.split(), *filter(None, [to]), **attributes)


def with_options(options: Sequence[Decorator], command: Callable[..., Any]) -> Callable[..., Any]:
    """Add options to a command, which lists them in this order."""
    return functools.reduce(lambda command, declared: declared(command), reversed(options), command)


_TYPES = {"FILE": click.Path(path_type=Path), "N": click.IntRange(min=1)}
_COMPLETIONS = {"MODEL": completion.models, "DATASTORE": completion.datastores}
rare_option = in_section(OPTIONS, rare=True)


class SectionedCommand(click.Command):
    """A command whose help lists its own options first, then each section, without the rare ones."""

    context_class = Context
    _help_all: click.Option | None = None  # Click compares options, so there is one object.

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return all parameters, with those for help at the end."""
        found = super().get_params(ctx)
        if not (n_rare := sum(map(is_rare, found))):
            return found
        self._help_all = self._help_all or click.Option(
            ["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_all,
            help=f"Show this message with {n_rare} more options.",
        )
        return [*found, self._help_all]

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
    """Return True if only `--help-all` shows it."""
    return isinstance(parameter, Option) and parameter.rare


def section_of(parameter: click.Parameter) -> str:
    return parameter.section if isinstance(parameter, Option) else OPTIONS


class SummaryGroup(click.Group):
    """A group that shows the whole first sentence of each command, which click would cut to the width of the terminal.

    `first` are the commands that people use most, and the others get a heading of their own. `also` maps names that
    people may try to what they mean here.
    """

    context_class = Context
    command_class = SectionedCommand

    def __init__(
        self, *arguments: Any, first: Sequence[str] = (), also: Mapping[str, str] | None = None, **attributes: Any
    ) -> None:
        super().__init__(*arguments, **attributes)
        self._first, self._also = first, also or {}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names = self.list_commands(ctx)
        others = [name for name in names if name not in self._first] if self._first else []
        for title, shown in (("Commands", self._first or names), ("More commands", others)):
            if rows := [(name, summary(command)) for name in shown if (command := self.get_command(ctx, name))]:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command as click does. Raises click.UsageError with the nearest name if it does not exist."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-") and not ctx.resilient_parsing:
            from difflib import get_close_matches

            near = [self._also[name]] if name in self._also else get_close_matches(name, self.list_commands(ctx), 1)
            raise click.UsageError(f"No such command {name!r}" + (f" (did you mean {near[0]!r}?)" if near else ""), ctx)
        return super().resolve_command(ctx, args)


def summary(command: click.Command) -> str:
    return command.get_short_help_str(limit=1000)
