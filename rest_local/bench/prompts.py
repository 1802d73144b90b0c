"""The prompts of the demo: real Python of the running interpreter, cut where a function begins.

Knows nothing about models. The held-out modules were neither in the demo model's training nor in the demo's datastore.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

from rest_local.errors import OptionError


@dataclass(frozen=True)
class Prompt:
    """`kind`: "unseen" (nothing to draft from), "stored" (the datastore holds it) or "copy" (the prompt holds it)."""

    kind: str
    title: str
    text: str


def standard_library() -> Path:
    """Return the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def held_out_modules() -> tuple[str, ...]:
    """Return the modules the demo model never saw, paths relative to the standard library. Raises OptionError."""
    return _listed("held_out.txt")


def well_known_modules() -> tuple[str, ...]:
    """Return the modules its training repeated, as text that it knows by heart. Raises OptionError."""
    return _listed("well_known.txt")


def _listed(name: str) -> tuple[str, ...]:
    package = Path(__file__).resolve().parent.parent
    for path in (package / "data" / name, package.parent / "models" / name):
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
            return tuple(line for line in lines if line and not line.startswith("#"))
    raise OptionError(f"{package}: the list of modules {name} is missing; install rest-local again")


def begin_of(text: str, characters: int) -> str:
    """Return `text` up to and including the first one-line `def` that starts at or after `characters`."""
    at = 0
    for line in text.splitlines(keepends=True):
        begins = at >= characters and line.lstrip().startswith("def ") and line.rstrip().endswith(":")
        at += len(line)
        if begins:
            return text[:at]
    return text[:characters]


def window(text: str, landmark: str, characters: int) -> str:
    """Return about `characters` of `text` from the line that starts with `landmark`, from the top where none does."""
    at = 0 if text.startswith(landmark) else text.find(f"\n{landmark}") + 1
    return begin_of(text[at:], characters)


def copying(text: str, landmark: str, characters: int, given: int) -> str:
    """Return a prompt whose natural continuation repeats it: a window of `text`, and its first `given` lines again."""
    piece = window(text, landmark, characters).rstrip().rpartition("\n")[0].rstrip() + "\n"
    again = "".join(piece.splitlines(keepends=True)[:given])
    return f"{piece}\n\n# The same code once more, unchanged:\n\n{again}"


def demo_prompts(library: Path | None = None) -> list[Prompt]:
    """Return the prompts, each short enough for a context of 1 024 with 200 tokens of answer. Raises OSError."""
    library = library or standard_library()

    def source(module: str) -> str:
        return (library / module).read_text(encoding="utf-8")

    return [
        Prompt("unseen", "a module the model never saw (csv)", window(source("csv.py"), "class DictReader", 700)),
        Prompt("stored", "code that the datastore holds (queue)", window(source("queue.py"), "class Queue", 1000)),
        Prompt("copy", "an answer that repeats the prompt (cmd)", copying(source("cmd.py"), "class Cmd", 1600, 6)),
    ]
