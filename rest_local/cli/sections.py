"""Options as commands declare them, where their values come from, and help in sections.

An option may name the section that it belongs to. Those that few people need are left out of `--help`, and are in
`--help-all`. What neither the command line nor the environment gives comes from the configuration (`cli.settings`),
which is read when an option is looked up for the first time, so --help does not depend on it.

Click's own names of variables would be REST_LOCAL_GENERATE_TOP_K, by the names of arguments. Its `default_map` holds
values by command; here one key is for all commands, and depends on the model. `Context.lookup_default` stands in its
place.

Importing this module loads click and the standard library only.
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

WIDEST = 100  # columns of help: longer lines are hard to read
OPTIONS = "Options"  # the section of options that name none
UNCONFIGURED = ("config", "completion")  # commands that work whatever is wrong with the file
_HYPHEN = "\N{NON-BREAKING HYPHEN}"  # while lines are broken
_COLUMN = 30  # columns for names at most, a third of a narrow terminal
_ALL, _SETTINGS = "rest_local.help_all", "rest_local.settings"  # what the contexts of one command line share
_FILES = ("FILE", "FOLDER", "MODEL")  # metavars of options that name a file without `click.Path`
Placed = tuple[tuple[str, ...], click.Command]  # a command, and the names that lead there
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Help(click.HelpFormatter):
    """Click's layout; a narrow terminal keeps room for the text, and --context-shift is not broken at hyphens."""

    def write_text(self, text: str) -> None:
        super().write_text(text.replace("-", _HYPHEN))

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = _COLUMN, col_spacing: int = 2) -> None:
        unbroken = [(name, text.replace("-", _HYPHEN)) for name, text in rows]
        super().write_dl(unbroken, min(col_max, self.width // 3), col_spacing)

    def getvalue(self) -> str:
        return super().getvalue().replace(_HYPHEN, "-")


class Context(click.Context):
    """Looks up in the configuration what neither the command line nor the environment gave."""

    formatter_class = Help

    def lookup_default(self, name: str, call: bool = True) -> Any:
        """As click's method. `call` is False for --help, which shows the defaults of the program."""
        key = next((option.key for option in options_of(self.command) if option.name == name), None)
        unconfigured = any(name in UNCONFIGURED for name in self.command_path.split())
        if key is None or not call or self.resilient_parsing or unconfigured:
            return None
        found = self.settings.find(key, self.model)
        return found and found.value

    @property
    def settings(self) -> Settings:
        """The file, with keys that some command knows. Raises ConfigInvalid."""
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
        """What -m says for this command line. Click looks given options up first, so -m is known if it was given."""
        option = next((option for option in options_of(self.command) if option.key == MODEL), None)
        if option is None:
            return None
        found = self.settings.find(MODEL, None)
        model = self.params.get(option.name or "") or option.value_from_envvar(self) or (found and found.value)
        return model if isinstance(model, str) else None


class Option(click.Option):
    """An option that is listed under `section`. `rare`: not in `--help`. `key`: its name in the configuration; None for
    one that deletes, or that means something else in another command. `also`: names that help does not list.
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
        """As click's method, without the names in `also`."""
        names, self.opts = self.opts, [name for name in self.opts if name not in self.also]
        try:
            return super().get_help_record(ctx)
        finally:
            self.opts = names

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        """As click's method. Raises ConfigInvalid for a value of the file."""
        if not isinstance(ctx, Context) or ctx.get_parameter_source(self.name or "") != ParameterSource.DEFAULT_MAP:
            return super().process_value(ctx, value)
        try:
            return self.of_file(value, ctx)
        except ValueError as error:
            found = ctx.settings.find(self.key or "", ctx.model)
            raise ctx.settings.wrong(self.key or "", found and found.profile, f"{self.key}: {error}") from error

    def of_file(self, value: Any, ctx: click.Context) -> Any:
        """A value of the file, as if it stood on the command line. Raises ValueError with what is wrong."""
        if isinstance(value, dict) or (isinstance(value, list) and not self.multiple):
            raise ValueError(f"takes one value, not a {'list' if isinstance(value, list) else 'table'}")
        texts = [toml_text(one) for one in (value if isinstance(value, list) else [value])]
        if isinstance(self.type, click.Path) or self.metavar in _FILES:  # no shell has replaced `~`
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
    """A message of click, without a range that it does not name."""
    return re.sub(r"(integer|float) range$", r"\1", message.rstrip("."))


def options_of(command: click.Command) -> list[Option]:
    return [parameter for parameter in command.params if isinstance(parameter, Option)]


def options_by_key(root: click.Command) -> dict[str, list[Option]]:
    """The options of each key in all commands that read the configuration. Loads all commands: takes 40 ms."""
    found: dict[str, list[Option]] = {}
    for path, command in commands_below(root):
        for option in options_of(command):
            if option.key is not None and path[:1] and path[0] not in UNCONFIGURED:
                found.setdefault(option.key, []).append(option)
    return found


def commands_below(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[Placed]:
    """A command and all below it."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            if (child := command.get_command(context, name)) is not None:
                yield from commands_below(child, (*path, name))


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
    also: str = "",
    **attributes: Any,
) -> Decorator:
    """`click.option`, declared as help shows it: `-n --tokens N`; without a value it is a flag.

    A FILE is a path, N a number from 1 on, unless `type` says otherwise. A default is shown. `to`: the parameter;
    `configurable`: whether the environment and the configuration set it; `also`: further names that people type, which
    other programs have for it; other `attributes` are click's.
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
    """Add options to a command, listed in this order."""
    return functools.reduce(lambda command, declared: declared(command), reversed(options), command)


_TYPES = {"FILE": click.Path(path_type=Path), "N": click.IntRange(min=1)}
_COMPLETIONS = {"MODEL": completion.models, "GGUF": completion.models, "DATASTORE": completion.datastores}
rare_option = in_section(OPTIONS, rare=True)


class SectionedCommand(click.Command):
    """A command whose help lists its own options first, then each section; rare ones with `--help-all` only."""

    context_class = Context
    _help_all: click.Option | None = None  # one object: click compares them

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """All parameters, those for help at the end."""
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
    """Whether only `--help-all` shows it."""
    return isinstance(parameter, Option) and parameter.rare


def section_of(parameter: click.Parameter) -> str:
    return parameter.section if isinstance(parameter, Option) else OPTIONS


class SummaryGroup(click.Group):
    """A group that shows the first sentence of each command whole; click cuts it to the width of the terminal.

    first   the commands that people use most: the others have a heading of their own
    also    names that people may try, and what they mean here
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
        """As click's method. Raises click.UsageError with the nearest command in place of one that does not exist."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-") and not ctx.resilient_parsing:
            from difflib import get_close_matches

            near = [self._also[name]] if name in self._also else get_close_matches(name, self.list_commands(ctx), 1)
            raise click.UsageError(f"No such command {name!r}" + (f" (did you mean {near[0]!r}?)" if near else ""), ctx)
        return super().resolve_command(ctx, args)


def summary(command: click.Command) -> str:
    return command.get_short_help_str(limit=1000)
