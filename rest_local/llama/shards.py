"""A model in several files, `NAME-00001-of-00003.gguf`: which belong to it, and whether all are there.

Contract: names only; what is in the files is judged by `gguf_header` and llama.cpp, which itself finds the others when
it is given the first.
"""

from __future__ import annotations

import re
from pathlib import Path

from rest_local.errors import ModelInvalid

_NAME = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def shards_of(path: Path) -> list[Path]:
    """All files of a model, `path` first; itself alone where its name does not say otherwise.

    Raises ModelInvalid where `path` is not the first of several, or another is missing."""
    match = _NAME.fullmatch(path.name)
    if match is None or not path.is_file():
        return [path]
    number, count = int(match["number"]), int(match["count"])
    names = [f"{match['name']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
    if not 1 <= number <= count:
        return [path]
    if number > 1:
        raise ModelInvalid(path, f"is part {number} of {count} of a model", f"give the first, {names[0]}")
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise ModelInvalid(path, f"is in {count} files, of which {_some(missing)} not there", "put all beside it")
    return [path.parent / name for name in names]


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    more = f" and {len(names) - 3} more are" if len(names) > 3 else " are" if len(names) > 1 else " is"
    return shown + more
