"""Prompts by where their answers can be drafted from, made of modules of the standard library.

- `unseen`: the beginning of a held-out module, to be continued.
- `edit`: a chat request to repeat a function of it with one name changed.
- `copy`: a passage of it, and its first lines again.
- `stored`: the beginning of a module that the demo's datastore holds and that the demo model saw many times in
  training, as larger models have seen popular code.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.library import begin_of, functions_in, held_out_modules, standard_library, well_known_modules

KINDS = ("unseen", "edit", "copy", "stored")


@dataclass(frozen=True)
class Prompt:
    """One prompt of a kind."""

    kind: str
    title: str
    text: str


def prompts() -> Iterator[Prompt]:
    """Yield three kinds of prompts for each held-out module, and the last kind for each well-known module."""
    library = standard_library()
    for name in well_known_modules():
        if (library / name).is_file():
            yield Prompt("stored", name, begin_of((library / name).read_text("utf-8"), 900)[-1600:])
    for name in held_out_modules():
        path = library / name
        if not path.is_file():
            continue
        text = path.read_text("utf-8")
        yield Prompt("unseen", name, begin_of(text, 900)[-1600:])
        if function := next(functions_in(text, 1400), None):
            yield Prompt("edit", name, _edit(function))
        piece = begin_of(text[len(text) // 3 :].partition("\n")[2], 900)[:1600].rpartition("\n")[0] + "\n"
        again = "".join(piece.splitlines(keepends=True)[:4])
        yield Prompt("copy", name, f"{piece}\n\n# once more:\n\n{again}")


def _edit(function: str) -> str:
    """Return a request in ChatML, the format of the demo model's training, with the beginning of its answer."""
    request, begun = _rename_request(function)
    return f"<|im_start|>user\n{request}<|im_end|>\n<|im_start|>assistant\n{begun}"


def _rename_request(function: str) -> tuple[str, str]:
    """Return a request to rename the most common name of a function, and the beginning of the answer to it."""
    names = Counter(re.findall(r"\b[a-z_]{4,}\b", function))
    old = next((n for n, _ in names.most_common() if n not in {"self", "return", "else", "from", "with"}), "name")
    begun = function.splitlines(keepends=True)[0].replace(old, f"new_{old}")
    return f"Rename `{old}` to `new_{old}`:\n```python\n{function}```", f"```python\n{begun}"
