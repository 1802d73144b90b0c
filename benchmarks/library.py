"""Texts of the standard library, by whether the small model of `models/` was trained on them."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

MODELS = Path(__file__).resolve().parents[1] / "models"


def standard_library() -> Path:
    """Return the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def held_out_modules() -> tuple[str, ...]:
    """Return the modules that the model never saw, as paths relative to the standard library."""
    return _listed("held_out.txt")


def well_known_modules() -> tuple[str, ...]:
    """Return the modules that its training repeats, so that it has memorised them."""
    return _listed("well_known.txt")


def _listed(name: str) -> tuple[str, ...]:
    lines = (MODELS / name).read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if line and not line.startswith("#"))


def begin_of(text: str, characters: int) -> str:
    """Return `text` up to and including the first one-line `def` that starts at or after `characters`."""
    at = 0
    for line in text.splitlines(keepends=True):
        begins = at >= characters and line.lstrip().startswith("def ") and line.rstrip().endswith(":")
        at += len(line)
        if begins:
            return text[:at]
    return text[:characters]


def functions_in(text: str, most: int) -> Iterator[str]:
    """Yield the functions and methods of 400 to `most` characters, with their indentation."""
    for found in re.finditer(r"(?m)^( *)def .*\n(?:(?:\1 +.*)?\n)+", text):
        if 400 <= len(found.group()) <= most:
            yield found.group().rstrip() + "\n"
