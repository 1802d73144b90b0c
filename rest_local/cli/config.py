"""`rest-local config`: show where each value comes from, and change the configuration file.

`set` and `unset` keep comments and order, and replace the whole file at once. `path` and --help do not read it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rest_local.cli import completion, settings
from rest_local.cli.options import Count
from rest_local.cli.sections import Option, SummaryGroup, option, options_by_key, toml_text
from rest_local.cli.settings import ENVIRONMENT, MODEL, PROFILE, Settings, variable_of
from rest_local.cli.terminal import columns, json_option, print_json, warn
from rest_local.errors import ConfigInvalid, OptionError, RestLocalError, printable

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem
    from tomlkit import TOMLDocument

HEADER = "# Options of rest-local, as `rest-local config show --all` lists them."
LOCK_TIMEOUT_S = 10.0
# Directories and files that only the environment sets (REST_LOCAL_CACHE), and no option.
_PLACES = ("cache", "config", "data", "datastores", "models", "shared")


def complete_keys(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Offer the keys, each with the help of its option."""
    from click.shell_completion import CompletionItem

    found = _options()
    shown = {key: (found[key][0].help or "").partition(". ")[0] for key in sorted(found) if key.startswith(incomplete)}
    return [CompletionItem(key, help=text) for key, text in shown.items()]


def complete_values(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Offer the values of the option whose key stands in the same command line."""
    options = _options().get(context.params.get("key") or "", [])
    if options and options[0].is_flag:
        return completion.starting(("true", "false"), incomplete)
    return list(options[0].shell_complete(context, incomplete)) if options else []


profile_option = option("--profile GLOB", "Apply only to models whose name matches.", configurable=False)


@click.group(cls=SummaryGroup)
def config() -> None:
    """Show and change the defaults of options.

    A value is looked up in this order: the command line, the environment (--top-k is REST_LOCAL_TOP_K), the profiles of
    the model, the top of the file, and the default of the program.
    """


@config.command()
@click.argument("keys", nargs=-1, metavar="[KEY...]", shell_complete=complete_keys)
@option("-m --model MODEL", "Apply this model's profiles.")
@option("--all", "List the defaults as well.", to="everything", configurable=False)
@json_option
def show(keys: tuple[str, ...], model: str | None, everything: bool, as_json: bool) -> None:
    """Show each value and where it comes from: the environment, a profile, the file, or the program.

    The whole file is checked. Without KEY, only values that are set are shown.
    """
    from difflib import get_close_matches

    options, found = _options(), Settings.load()
    found.check_keys(options)
    for profile, table in found.tables.items():
        for key, value in table.items():
            if fault := _fault(options[key], value):
                raise found.wrong(key, profile, f"{key}: {fault}")
    known = {*map(variable_of, options), *map(variable_of, _PLACES)}
    for name in sorted(name for name in os.environ if name.startswith(f"{ENVIRONMENT}_") and name not in known):
        near = get_close_matches(name, known, 1)
        warn(f"{name}: no option has this variable{f'; did you mean {near[0]}?' if near else ''}")
    for key in keys:
        _check_key(key, options)
    if not model:
        named = found.find(MODEL, None)
        model = os.environ.get(variable_of(MODEL)) or (named.value if named else None)
    rows = [_row(key, options[key], found, model) for key in keys or sorted(options)]
    if not (keys or everything):
        rows = [row for row in rows if row["source"] != "default"]
    if as_json:
        return print_json({"path": str(found.path), "model": model, "settings": rows})
    path = str(found.path)
    with suppress(ValueError, RuntimeError):  # The file is elsewhere, or there is no home directory.
        path = str(Path("~") / found.path.relative_to(Path.home()))
    origins = {"environment": "environment, {variable}", "profile": '{path}:{line}, profile "{profile}"'}
    origins |= {"file": "{path}:{line}", "default": "default"}
    lines = [(row["key"], _toml(row["value"]), origins[row["source"]].format(path=path, **row)) for row in rows]
    nothing = f"nothing is set; `rest-local config set KEY VALUE` writes {found.path}"
    return click.echo("\n".join(columns(lines)) or nothing)


@config.command(name="set", context_settings={"ignore_unknown_options": True})
@click.argument("key", shell_complete=complete_keys)
@click.argument("values", nargs=-1, required=True, metavar="VALUE...", shell_complete=complete_values)
@profile_option
def set_(key: str, values: tuple[str, ...], profile: str | None) -> None:
    """Set the default of an option.

    \b
    rest-local config set top-k 20
    rest-local config set datastore mycode stdlib
    rest-local config set ctx 32768 --profile 'qwen*'
    """
    options, path = _options(), _path()
    _check_key(key, options)
    if profile == "":
        raise OptionError("--profile: give a glob, for example 'qwen*'; '*' is every model")
    if key == MODEL and profile is not None:
        raise OptionError("model: the model chooses the profile, so a profile cannot hold it; leave out --profile")
    if len(values) > 1 and not options[key][0].multiple:
        raise OptionError(f"{key}: takes one value, not {len(values)}")
    if fault := _fault(options[key], list(values) if options[key][0].multiple else values[0]):
        raise OptionError(f"{key}: {fault}")
    scalars = [_scalar(options[key][0], text) for text in values]
    value = scalars if options[key][0].multiple else scalars[0]
    with _changed(path) as document:
        _table(document, profile)[key] = value
    click.echo(printable(f"{key} = {_toml(value)} in {_place(path, profile)}"))
    if os.environ.get(variable_of(key)):
        warn(f"{variable_of(key)} is set in the environment and counts instead")


@config.command()
@click.argument("key", shell_complete=complete_keys)
@profile_option
def unset(key: str, profile: str | None) -> None:
    """Remove a key from the file, so that the default of the program applies again."""
    path = _path()
    with _changed(path) as document:
        tables: Any = document.get(PROFILE, {}) if profile is not None else {PROFILE: document}
        table = tables.get(profile if profile is not None else PROFILE, {})
        if key not in table or (table is document and key == PROFILE):
            raise RestLocalError(f"{key} is not set in {_place(path, profile)}; `rest-local config show` lists what is")
        del table[key]
        if profile is not None and not table:
            del tables[profile]
    click.echo(printable(f"{key} removed from {_place(path, profile)}"))


@config.command()
def path() -> None:
    """Print the path of the configuration file, which need not exist. REST_LOCAL_CONFIG names another one."""
    click.echo(str(_path()))


def _options() -> dict[str, list[Option]]:
    from rest_local.cli.main import cli

    return options_by_key(cli)


def _path() -> Path:
    from rest_local.paths import config_file

    return config_file()


def _check_key(key: str, options: Iterable[str]) -> None:
    if key not in options:
        raise OptionError(settings.unknown(key, options))


def _fault(options: Iterable[Option], value: Any) -> str:
    """Return why none of these options takes a value, or an empty string if one of them does."""
    faults = []
    for each in options:
        try:
            each.of_file(value, click.Context(click.Command("config")))
            return ""
        except ValueError as error:
            faults.append(str(error))
    return faults[0]


def _row(key: str, options: Sequence[Option], found: Settings, model: str | None) -> dict[str, Any]:
    """Return one line of `show`, JSON-ready. `line` is the line of the file on which the value ends."""
    variable = variable_of(key)
    if os.environ.get(variable):  # Click ignores an empty variable.
        return {"key": key, "value": os.environ[variable], "source": "environment", "variable": variable}
    in_file = found.find(key, model)
    if in_file is None:
        return {"key": key, "value": _default(options), "source": "default"}
    profile = {} if in_file.profile is None else {"profile": in_file.profile}
    source = {"key": key, "value": in_file.value, "source": "profile" if profile else "file"}
    return source | profile | {"line": found.line(key, in_file.profile)}


def _default(options: Sequence[Option]) -> Any:
    """Return the default of the program, or None if there is none or it depends on the command."""
    context = click.Context(click.Command("config"))
    first, *others = (option.get_default(context) for option in options)
    is_plain = isinstance(first, (bool, int, float, str)) and all(other == first for other in others)
    return first if is_plain else None


def _scalar(option: Option, text: str) -> bool | int | float | str:
    """Return the value as the file holds it: as a truth value or a number if the option takes one."""
    if option.is_flag:
        return click.BOOL.convert(text, None, None)
    if isinstance(option.type, click.types.FloatParamType):
        return float(text)
    if isinstance(option.type, (click.types.IntParamType, Count)):
        with suppress(ValueError):  # `all` and `auto` stay text.
            return int(text)
    return text


@contextmanager
def _changed(path: Path) -> Iterator[TOMLDocument]:
    """Yield the file's document to be changed, and replace the file afterwards, keeping its comments and its mode.

    A lock keeps other processes from changing it meanwhile. It lies in the data directory, so that no new file appears
    beside the configuration. Raises ConfigInvalid.
    """
    import tomlkit
    from filelock import FileLock, Timeout

    from rest_local.paths import data_dir, write_atomically

    target = path.resolve()
    if target.exists() and not target.is_file():  # Writing would replace /dev/null, for example, by a file.
        raise ConfigInvalid(path, None, "not a regular file; REST_LOCAL_CONFIG names another one")
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(data_dir() / "config.lock", timeout=LOCK_TIMEOUT_S, mode=0o600):
            text = settings.read(path)
            Settings(path, text)  # This raises an error that names the line, which `parse` below does not.
            document = tomlkit.parse(text or f"{HEADER}\n\n")
            yield document
            mode = target.stat().st_mode & 0o777 if target.exists() else 0o600
            write_atomically(target, document.as_string().encode(), durable=True)
            target.chmod(mode)
    except Timeout:
        raise ConfigInvalid(path, None, f"another process has been changing it for {LOCK_TIMEOUT_S:.0f} s") from None
    except OSError as error:
        cause = f"cannot be written: {error.strerror or error}; REST_LOCAL_CONFIG names another file"
        raise ConfigInvalid(path, None, cause) from error


def _table(document: TOMLDocument, profile: str | None) -> Any:
    """Return the table that a key belongs to, and make it if it is missing."""
    import tomlkit

    if profile is None:
        return document
    profiles: Any = document.setdefault(PROFILE, tomlkit.table(is_super_table=True))
    return profiles.setdefault(profile, tomlkit.table())


def _place(path: Path, profile: str | None) -> str:
    return str(path) if profile is None else f'{path}, profile "{profile}"'


def _toml(value: Any) -> str:
    """Return a value as the file would hold it, or `-` for None."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else toml_text(value)
