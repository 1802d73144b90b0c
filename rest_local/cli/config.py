"""`rest-local config`: show the defaults of options, and where each comes from. `path` and --help read no file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from rest_local.cli import settings
from rest_local.cli.sections import Option, SummaryGroup, option, options_by_key, toml_text
from rest_local.cli.settings import ENVIRONMENT, MODEL, Settings, variable_of
from rest_local.cli.terminal import columns, json_option, print_json, warn
from rest_local.errors import OptionError

# Directories and files that only the environment sets (REST_LOCAL_CACHE), and no option.
_PLACES = ("cache", "config", "data", "datastores", "models", "shared")


@click.group(cls=SummaryGroup)
def config() -> None:
    """Show the defaults of options, which the configuration file sets.

    A value is looked up in this order: the command line, the environment (--top-k is REST_LOCAL_TOP_K), the profiles of
    the model, the top of the file, and the default of the program.
    """


@config.command()
@click.argument("keys", nargs=-1, metavar="[KEY...]")
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
        if key not in options:
            raise OptionError(settings.unknown(key, options))
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
    nothing = f"nothing is set; write lines such as `top-k = 20` into {found.path}"
    return click.echo("\n".join(columns(lines)) or nothing)


@config.command()
def path() -> None:
    """Print the path of the configuration file, which need not exist. REST_LOCAL_CONFIG names another one."""
    from rest_local.paths import config_file

    click.echo(str(config_file()))


def _options() -> dict[str, list[Option]]:
    from rest_local.cli.main import cli

    return options_by_key(cli)


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


def _toml(value: Any) -> str:
    """Return a value as the file would hold it, or `-` for None."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else toml_text(value)
