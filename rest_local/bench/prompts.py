"""The prompts of the demo and of the benchmarks: real source files, cut at the start of a function, or to be edited.

The held-out modules are neither in the demo model's training nor in the demo's datastore. The module knows nothing
about models.
"""

from __future__ import annotations

import keyword
import re
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rest_local.errors import OptionError

SOURCE_FILES = (".py", ".js", ".ts", ".go", ".rs", ".c", ".cc", ".cpp", ".h", ".java", ".rb", ".kt", ".swift", ".cs")


@dataclass(frozen=True)
class Prompt:
    """One prompt. `kind` says where its answer can be drafted from: "unseen" (nowhere), "stored" (the datastore),
    "copy" (the prompt) or "edit" (the prompt and `prediction`). `chat`: the text is a question for the model's chat
    template.
    """

    kind: str
    title: str
    text: str
    chat: bool = False
    prediction: str = ""


def standard_library() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def held_out_modules() -> tuple[str, ...]:
    """The modules that the demo model never saw, paths relative to the standard library. Raises OptionError."""
    return _listed("held_out.txt")


def well_known_modules() -> tuple[str, ...]:
    """The modules that its training repeats, so that it has memorised them. Raises OptionError."""
    return _listed("well_known.txt")


def _listed(name: str) -> tuple[str, ...]:
    package = Path(__file__).resolve().parent.parent
    for path in (package / "data" / name, package.parent / "models" / name):
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
            return tuple(line for line in lines if line and not line.startswith("#"))
    raise OptionError(f"{package}: the list of modules {name} is missing; install rest-local again")


def begin_of(text: str, characters: int) -> str:
    """`text` up to and including the first one-line `def` that starts at or after `characters`."""
    at = 0
    for line in text.splitlines(keepends=True):
        begins = at >= characters and line.lstrip().startswith("def ") and line.rstrip().endswith(":")
        at += len(line)
        if begins:
            return text[:at]
    return text[:characters]


def window(text: str, landmark: str, characters: int) -> str:
    """About `characters` of `text` from the line that starts with `landmark`, or from the top if no line does."""
    at = 0 if text.startswith(landmark) else text.find(f"\n{landmark}") + 1
    return begin_of(text[at:], characters)


def unseen_prompt(chat: bool) -> Prompt:
    """A prompt whose answer cannot be looked up: a held-out module or, with `chat`, a story. Raises OSError."""
    if chat:
        return Prompt("unseen", "a short story", "Write a story of 200 words about a lighthouse keeper.", chat=True)
    text = (standard_library() / "csv.py").read_text(encoding="utf-8")
    return Prompt("unseen", "csv.py", window(text, "class DictReader", 700))


def stored_prompt(code: Path | None) -> Prompt:
    """The beginning of a file that the datastore holds: from the folder `code`, else from the standard library.

    Raises OptionError if the folder holds no source file, and OSError.
    """
    if code is None:
        text = (standard_library() / "queue.py").read_text(encoding="utf-8")
        return Prompt("stored", "queue.py", window(text, "class Queue", 1000))
    path, text = _source_of(code)
    return Prompt("stored", path.name, begin_of(text, 800)[-1600:])


def edit_prompt(code: Path | None) -> Prompt:
    """A request to rename the most common name of a file, with the file as prediction. Raises OptionError, OSError."""
    if code is None:
        path, text = Path("queue.py"), (standard_library() / "queue.py").read_text(encoding="utf-8")
        text = window(text, "class Queue", 2000)
    else:
        path, text = _source_of(code)
        text = begin_of(text, 2000)
    names = Counter(re.findall(r"\b[a-z_]{4,}\b", text))
    name = next((name for name, _ in names.most_common() if not keyword.iskeyword(name) and name != "self"), "name")
    request = f"Rename `{name}` to `new_{name}` in this file. Answer with the whole file and nothing else.\n\n{text}"
    return Prompt("edit", f"{path.name}, one name changed", request, chat=True, prediction=text)


def _source_of(code: Path) -> tuple[Path, str]:
    """The file of the folder whose size is nearest to 6 000 bytes, and its text. Raises OptionError, OSError."""
    files = [path for path in sorted(code.rglob("*")) if path.suffix in SOURCE_FILES and path.is_file()]
    sizes = {path: path.stat().st_size for path in files if not any(part.startswith(".") for part in path.parts[-3:])}
    if not sizes:
        raise OptionError(f"--code {code}: holds no source file ({', '.join(SOURCE_FILES)})")
    path = min(sizes, key=lambda path: abs(sizes[path] - 6000))
    return path, path.read_text(encoding="utf-8", errors="replace")
