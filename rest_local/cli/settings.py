"""The configuration file: values of options that neither the command line nor the environment gives.

The key of an option is its first long name, such as `top-k` for --top-k, whose variable is REST_LOCAL_TOP_K. It means
the same in every command. A value is looked up on the command line, in the environment, in the profiles of the model,
and at the top of the file. If none of them has it, the default counts.

The file is TOML. `[profile."GLOB"]` holds the keys for the models that the glob matches, and if several tables match,
the last one wins. Click reads a value as if it stood on the command line. Unknown keys and wrong values raise
ConfigInvalid with the line.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from rest_local.errors import ConfigInvalid

ENVIRONMENT = "REST_LOCAL"
PROFILE = "profile"
MODEL = "model"


def variable_of(key: str) -> str:
    """Return the environment variable of a key: REST_LOCAL_TOP_K for top-k."""
    return f"{ENVIRONMENT}_{key.replace('-', '_').upper()}"


class Found(NamedTuple):
    """A value and the place it came from. `profile` is the glob of its table, or None for the top of the file."""

    value: Any
    profile: str | None


class Settings:
    """The content of a configuration file, without knowledge of the options.

    `tables` has the top of the file under None, then the profiles under their globs, in the order of the file.
    """

    def __init__(self, path: Path, text: str = "") -> None:
        self.path, self._text = path, text
        top = _parse(path, text)
        profiles = top.pop(PROFILE, {})
        if not isinstance(profiles, dict) or not all(isinstance(table, dict) for table in profiles.values()):
            raise ConfigInvalid(path, self.line(PROFILE), f'write [{PROFILE}."GLOB"], and the keys in the lines below')
        self.tables: dict[str | None, dict[str, Any]] = {None: top, **profiles}

    @classmethod
    def load(cls) -> Settings:
        """Read the user's file, or nothing if there is none. Raises ConfigInvalid."""
        from rest_local.paths import config_file

        return cls(config_file(), read(config_file()))

    def find(self, key: str, model: str | None) -> Found | None:
        """Return the value that counts for a model, named as -m names it. None means the default model."""
        held = [Found(table[key], glob) for glob, table in self.tables.items() if key in table]
        return next((found for found in reversed(held) if found.profile is None or matches(found.profile, model)), None)

    def line(self, key: str, profile: str | None = None) -> int | None:
        """Return the line on which a value ends, from 1."""
        lines = self._text.splitlines(keepends=True)
        for number in range(1, len(lines) + 1):
            try:
                table = _parse(self.path, "".join(lines[:number]))
            except ConfigInvalid:  # This line is in the middle of a value.
                continue
            if key in (table if profile is None else table.get(PROFILE, {}).get(profile, {})):
                return number
        return None

    def wrong(self, key: str, profile: str | None, cause: str) -> ConfigInvalid:
        return ConfigInvalid(self.path, self.line(key, profile), cause)

    def check_keys(self, known: Iterable[str]) -> None:
        """Raise ConfigInvalid for a key that no option has."""
        for key, profile in sorted((key, glob or "") for glob, table in self.tables.items() for key in table):
            if key == MODEL and profile:
                raise self.wrong(key, profile, f"{key}: the model chooses the profile, so a profile cannot hold it")
            if key not in known:
                raise self.wrong(key, profile or None, unknown(key, known))


def read(path: Path) -> str:
    """Read the configuration file, or return an empty string if there is none. Raises ConfigInvalid."""
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
    """Return True if a profile is for a model: its glob matches the text of -m, its last part, or that without `.gguf`.

    Case does not count. Without a model the name is `smollm2`.
    """
    text = model or "smollm2"
    last = re.split(r"[/\\]", text)[-1]
    names = (text, os.path.expanduser(text), last, re.sub(r"\.gguf$", "", last, flags=re.IGNORECASE))
    pattern = os.path.expanduser(glob).casefold()
    return any(fnmatch.fnmatchcase(name.casefold(), pattern) for name in names)


def unknown(key: str, known: Iterable[str]) -> str:
    """Return the message about a key that no option has."""
    from difflib import get_close_matches

    if key.replace("_", "-") in known:
        return f"unknown key {key}; write {key.replace('_', '-')}"
    if key.startswith("no-") and key[3:] in known:
        return f"unknown key {key}; write {key[3:]} = false"
    near = get_close_matches(key, known, 1)
    meant = f"did you mean {near[0]}? " if near else ""
    return f"unknown key {key}; {meant}`rest-local config show --all` lists the keys"


def _parse(path: Path, text: str) -> dict[str, Any]:
    import tomlkit
    from tomlkit.exceptions import ParseError

    try:
        return tomlkit.parse(text).unwrap()
    except ValueError as error:
        line = error.line if isinstance(error, ParseError) else text.count("\n") + 1
        cause = re.sub(r" at (line|end of).*$", "", str(error))
        raise ConfigInvalid(path, line, f"not TOML: {cause}; correct it there") from error
