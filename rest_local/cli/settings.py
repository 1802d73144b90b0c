"""Options that are not given on the command line: their keys, environment variables, and values in the configuration.

The key of an option is its first long name: `top-k` for --top-k, whose variable is REST_LOCAL_TOP_K. It means the same
in every command. An option that deletes, or that means something else in another command, has no key
(`configurable=False`). A value comes from the command line, else the environment, else the profiles of the model,
else the file, else the default.

The file is TOML. Keys stand at its top; `[profile."GLOB"]` holds keys for the models that the glob matches, and of
several such tables the last one wins. The file is read when an option is looked up for the first time, so --help does
not depend on it. Unknown keys and wrong values raise ConfigInvalid with the line.

Importing this module loads click and the standard library only.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from rest_local.cli.sections import HelpContext
from rest_local.errors import ConfigInvalid, RestLocalError

ENVIRONMENT = "REST_LOCAL"
PROFILE = "profile"
MODEL = "model"
_META = "rest_local.settings"  # where the contexts of one command line share the file
_FILES = ("FILE", "FOLDER", "MODEL")  # metavars of options that name a file without `click.Path`


def key_of(parameter: click.Parameter) -> str | None:
    """The key of an option in the configuration; None for a parameter that takes no part."""
    if not isinstance(parameter, click.Option) or not parameter.allow_from_autoenv or parameter.is_eager:
        return None
    return next((name for name in parameter.opts if name.startswith("--")), parameter.opts[0]).lstrip("-")


def variable_of(key: str) -> str:
    """The environment variable of a key: REST_LOCAL_TOP_K for top-k."""
    return f"{ENVIRONMENT}_{key.replace('-', '_').upper()}"


def prepare(command: click.Command, configured: bool = True) -> None:
    """Let a command and its subcommands read the environment and, if `configured`, the configuration.

    Click's own way would be REST_LOCAL_GENERATE_TOP_K, and would go by the name of the argument (`as_json`), not by
    that of the option.
    """
    command.context_class = ConfiguredContext if configured else HelpContext
    for parameter in command.params:
        key = key_of(parameter)
        if key is not None:
            parameter.envvar = variable_of(key)
    for child in getattr(command, "commands", {}).values():
        prepare(child, configured)


def options_by_key(root: click.Command) -> dict[str, list[click.Option]]:
    """The options of each key in all commands that read the configuration. Loads all commands: takes 40 ms."""
    found: dict[str, list[click.Option]] = {}
    for command in _commands(root):
        for parameter in command.params:
            key = key_of(parameter)
            if key is not None and command.context_class is ConfiguredContext:
                assert isinstance(parameter, click.Option)
                found.setdefault(key, []).append(parameter)
    return found


def _commands(command: click.Command) -> Iterator[click.Command]:
    yield command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if child is not None:
                yield from _commands(child)


@dataclass(frozen=True)
class Found:
    """A value and where it came from. `profile`: the glob of its table, None for the top of the file."""

    value: Any
    profile: str | None = None


class Settings:
    """The content of a configuration file, without knowledge of the options."""

    def __init__(self, path: Path, text: str = "") -> None:
        self.path, self._text = path, text
        top = _parse(path, text)
        profiles = top.pop(PROFILE, {})
        if not isinstance(profiles, dict) or not all(isinstance(table, dict) for table in profiles.values()):
            raise ConfigInvalid(path, self.line(PROFILE), f'write [{PROFILE}."GLOB"], and the keys in the lines below')
        self._tables: dict[str | None, dict[str, Any]] = {None: top, **profiles}  # in the order of the file

    @classmethod
    def load(cls) -> Settings:
        """Read the user's file; empty where there is none. Raises ConfigInvalid."""
        from rest_local.paths import config_file

        return cls(config_file(), read(config_file()))

    def keys(self) -> set[str]:
        return {key for table in self._tables.values() for key in table}

    def profiles(self, key: str) -> list[str | None]:
        """The tables that hold a key, in the order of the file, None for the top."""
        return [glob for glob, table in self._tables.items() if key in table]

    def value(self, key: str, profile: str | None = None) -> Any:
        """The value in one table. Raises KeyError."""
        return self._tables[profile][key]

    def find(self, key: str, model: str | None) -> Found | None:
        """The value that counts for a model, named as -m names it; None: the demo model."""
        globs = reversed(self.profiles(key))
        glob = next((glob for glob in globs if glob is None or matches(glob, model)), "")
        return None if glob == "" else Found(self._tables[glob][key], glob)

    def line(self, key: str, profile: str | None = None) -> int | None:
        """The line on which a value ends, from 1."""
        lines = self._text.splitlines(keepends=True)
        for number in range(1, len(lines) + 1):
            try:
                table = _parse(self.path, "".join(lines[:number]))
            except ConfigInvalid:  # in the middle of a value of several lines
                continue
            if profile is not None:
                table = table.get(PROFILE, {}).get(profile, {})
            if key in table:
                return number
        return None

    def check_keys(self, known: Iterable[str]) -> None:
        """Raise ConfigInvalid for a key that no option has."""
        known = sorted({*known} - {MODEL})
        for key in sorted(self.keys()):
            for profile in self.profiles(key):
                if key == MODEL and profile is not None:
                    cause = "the model chooses the profile, so a profile cannot hold it"
                    raise ConfigInvalid(self.path, self.line(key, profile), f"{key}: {cause}")
                if key not in known and key != MODEL:
                    raise ConfigInvalid(self.path, self.line(key, profile), unknown(key, known))


def read(path: Path) -> str:
    """The text of a configuration file; empty where there is none. Raises ConfigInvalid."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except UnicodeDecodeError as error:
        raise ConfigInvalid(path, None, f"not UTF-8 text at byte {error.start}; save it as UTF-8") from error
    except OSError as error:
        cause = f"{error.strerror or error}; REST_LOCAL_CONFIG names another file"
        raise ConfigInvalid(path, None, cause) from error


def matches(glob: str, model: str | None) -> bool:
    """Whether a profile is for a model: by the text that -m gives, its last part, or that without `.gguf`. Letters
    match in either case. Without a model the name is `demo`.
    """
    text = model or "demo"
    last = re.split(r"[/\\]", text)[-1]
    names = (text, os.path.expanduser(text), last, re.sub(r"\.gguf$", "", last, flags=re.IGNORECASE))
    pattern = os.path.expanduser(glob).casefold()
    return any(fnmatch.fnmatchcase(name.casefold(), pattern) for name in names)


def unknown(key: str, known: Iterable[str]) -> str:
    """What to say about a key that no option has."""
    known = sorted(known)
    if key.replace("_", "-") in known:
        return f"unknown key {key}; write {key.replace('_', '-')}"
    if key.startswith("no-") and key[3:] in known:
        return f"unknown key {key}; write {key[3:]} = false"
    from difflib import get_close_matches

    near = get_close_matches(key, known, 1)
    meant = f"did you mean {near[0]}? " if near else ""
    return f"unknown key {key}; {meant}`rest-local config show --all` lists the keys"


def checked(option: click.Option, value: Any, context: click.Context) -> Any:
    """Return a value of the file as click takes it for the option. Raises ValueError with what is wrong."""
    values = value if isinstance(value, list) else [value]
    # of `-m` the file names one: only `serve` could take others
    if isinstance(value, list) and (not option.multiple or getattr(option.type, "one_in_settings", False)):
        raise ValueError("takes one value, not a list")
    for one in values:
        _check_kind(option, one)
    if isinstance(option.type, click.Path) or option.metavar in _FILES:  # no shell has replaced `~`
        values = [os.path.expanduser(one) if isinstance(one, str) else one for one in values]
    given = tuple(values) if option.multiple else values[0]
    try:
        option.process_value(context, given)
    except click.BadParameter as error:
        raise ValueError(error.message.rstrip(".")) from error
    except RestLocalError as error:
        raise ValueError(str(error)) from error
    return given


def _check_kind(option: click.Option, value: Any) -> None:
    """Click would convert the text "20" to a number, and 1 to true."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    kind = option.type
    if option.is_flag:
        fits, wanted = isinstance(value, bool), "true or false"
    elif isinstance(kind, click.types.IntParamType):
        fits, wanted = number and isinstance(value, int), "a whole number"
    elif isinstance(kind, click.types.FloatParamType):
        fits, wanted = number, "a number"
    elif isinstance(kind, (click.types.StringParamType, click.Path, click.Choice)):
        fits, wanted = isinstance(value, str), "a text in quotes"
    else:
        fits, wanted = number or isinstance(value, str), "a number, or a text in quotes"
    if not fits:
        shown = json.dumps(value) if isinstance(value, bool) else repr(value)
        if not isinstance(value, (bool, int, float, str)):
            shown = f"a value of the kind {type(value).__name__}"
        raise ValueError(f"{shown} is not {wanted}")


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        if sys.version_info >= (3, 11):
            import tomllib

            return tomllib.loads(text)
        import tomlkit

        return dict(tomlkit.parse(text).unwrap())
    except ValueError as error:
        found = re.search(r"line (\d+)", str(error))
        line = int(found[1]) if found else text.count("\n") + 1  # at the end of the document
        cause = re.sub(r" *\(?at (line|end of doc).*$", "", str(error))
        raise ConfigInvalid(path, line, f"no TOML: {cause}; correct it there") from error


class ConfiguredContext(HelpContext):
    """Looks up in the configuration what neither the command line nor the environment gave."""

    def lookup_default(self, name: str, call: bool = True) -> Any:
        """As click's method. `call` is False for --help, which shows the defaults of the program."""
        if not call or self.resilient_parsing:
            return None
        option = next((option for option in self.command.params if option.name == name), None)
        key = key_of(option) if option else None
        if key is None:
            return None
        assert isinstance(option, click.Option)
        settings = self._settings()
        found = settings.find(key, self._model(settings))
        if found is None:
            return None
        try:
            return checked(option, found.value, self)
        except ValueError as error:
            raise ConfigInvalid(settings.path, settings.line(key, found.profile), f"{key}: {error}") from error

    def _settings(self) -> Settings:
        settings = self.meta.get(_META)
        if not isinstance(settings, Settings):
            settings = Settings.load()
            own = {key_of(parameter) for parameter in self.command.params}
            if settings.keys() - own or settings.profiles(MODEL) not in ([], [None]):
                settings.check_keys(options_by_key(self.find_root().command))
            self.meta[_META] = settings
        return settings

    def _model(self, settings: Settings) -> str | None:
        """What -m says for this command line. Click looks given options up first, so -m is known if it was given."""
        option = next((option for option in self.command.params if key_of(option) == MODEL), None)
        if option is None:
            return None
        given = self.params.get(option.name or "") or option.value_from_envvar(self)
        if isinstance(given, str):
            return given
        found = settings.find(MODEL, None)
        return found.value if found and isinstance(found.value, str) else None


def check_all(settings: Settings, options: Mapping[str, Sequence[click.Option]]) -> None:
    """Check every key and value of a file. Raises ConfigInvalid for the first fault."""
    settings.check_keys(options)
    for key in sorted(settings.keys()):
        for profile in settings.profiles(key):
            fault = fault_of(options[key], settings.value(key, profile))
            if fault:
                raise ConfigInvalid(settings.path, settings.line(key, profile), f"{key}: {fault}")


def fault_of(options: Iterable[click.Option], value: Any) -> str:
    """What is wrong with a value for all of these options; empty if one of them takes it."""
    fault = ""
    for option in options:
        try:
            checked(option, value, click.Context(click.Command("config")))
            return ""
        except ValueError as error:
            fault = fault or str(error)
    return fault
