"""Transcripts of coding agents, made from the history of git repositories: a file is read, then it is edited.

Each change of a file becomes one transcript in each `Format`: the client's way to show a file to the model and the
model's way to write the change. The prompt is the conversation up to the edit, in ChatML: instructions, an earlier edit
of the same repository in the same format (so that the frame of a call was seen before), another file that was read,
and the file itself. The answer is a sentence and the edit. Nothing here comes from a model, so what is missing is what
models do between edits: long thoughts, searches, wrong edits.

The formats are those of aider, Cline, Claude Code and Codex, as their sources have them; calls are written as models
write them (`rest_local.chat.tools`).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.recorded import Recorded, edits_of
from rest_local.chat.tools.format import write_calls
from rest_local.llama.vocabulary import Vocabulary

MOST_BYTES = 12 * 2**10


class Change(NamedTuple):
    """One changed file."""

    path: str
    message: str
    old: str
    new: str


class Hunk(NamedTuple):
    """Replaced lines with unchanged lines around them. `marked` has them as in a patch."""

    old: str
    new: str
    marked: str
    heading: str


@dataclass(frozen=True)
class Format:
    """The way a client shows files and writes an edit.

    `show` returns the part of the conversation in which the model reads a file (path, text), and `write` the answer
    that makes a change.
    """

    name: str
    show: Callable[[str, str], str]
    write: Callable[[Change], str]


def hunks(old: str, new: str, around: int, heading: bool = False) -> list[Hunk]:
    """Return the changes, each with `around` unchanged lines, or more until its old text occurs once."""
    a, b = old.splitlines(keepends=True), new.splitlines(keepends=True)
    matcher = SequenceMatcher(None, a, b, autojunk=False)
    found = []
    for group in matcher.get_grouped_opcodes(around):
        before, after = a[group[0][1] : group[-1][2]], b[group[0][3] : group[-1][4]]
        first, at_new = group[0][1], group[0][3]
        extra: list[str] = []
        while old.count("".join(extra + before)) > 1 and first and a[first - 1] == b[at_new - 1]:
            first, at_new = first - 1, at_new - 1
            extra.insert(0, a[first])
        marked = [" " + line for line in extra]
        for kind, i1, i2, j1, j2 in group:
            if kind == "equal":
                marked += [" " + line for line in a[i1:i2]]
            else:
                marked += ["-" + line for line in a[i1:i2]] + ["+" + line for line in b[j1:j2]]
        above = next((line for line in reversed(a[:first]) if line.startswith(("def ", "class "))), "")
        found.append(Hunk("".join(extra + before), "".join(extra + after), "".join(map(_ended, marked)), above.strip()))
    return found


def _ended(line: str) -> str:
    return line if line.endswith("\n") else line + "\n"


def _numbered(text: str, width: int, mark: str) -> str:
    return "\n".join(f"{n:{width}}{mark}{line}" for n, line in enumerate(text.split("\n"), 1))


def _turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def _call(name: str, arguments: Mapping[str, Any]) -> str:
    return write_calls([{"name": name, "arguments": arguments}])


def _claude_show(path: str, text: str) -> str:
    call = _turn("assistant", "I will read the file.\n" + _call("Read", {"file_path": path}))
    numbered = _numbered(text, 6, "\N{RIGHTWARDS ARROW}")
    return call + _turn("user", f"<tool_response>\n{numbered}\n</tool_response>")


def _edit(change: Change) -> str:
    path = "/repo/" + change.path
    edits = [{"file_path": path, "old_string": h.old, "new_string": h.new} for h in hunks(change.old, change.new, 2)]
    return "I will make the change.\n" + write_calls([{"name": "Edit", "arguments": edit} for edit in edits])


def _multi_edit(change: Change) -> str:
    edits = [{"old_string": h.old, "new_string": h.new} for h in hunks(change.old, change.new, 2)]
    return "I will make the change.\n" + _call("MultiEdit", {"file_path": "/repo/" + change.path, "edits": edits})


def _write(change: Change) -> str:
    return "I will write the file.\n" + _call("Write", {"file_path": "/repo/" + change.path, "content": change.new})


def _cline_show(path: str, text: str) -> str:
    call = _turn("assistant", f"I will read the file.\n<read_file>\n<path>{path}</path>\n</read_file>")
    return call + _turn("user", f"[read_file for '{path}'] Result:\n{_numbered(text, 0, ' | ')}")


def _cline_replace(change: Change) -> str:
    blocks = "".join(
        f"------- SEARCH\n{_ended(h.old)}=======\n{_ended(h.new)}+++++++ REPLACE\n"
        for h in hunks(change.old, change.new, 2)
    )
    return (
        f"I will make the change.\n<replace_in_file>\n<path>{change.path}</path>\n"
        f"<diff>\n{blocks}</diff>\n</replace_in_file>"
    )


def _cline_write(change: Change) -> str:
    return (
        f"I will write the file.\n<write_to_file>\n<path>{change.path}</path>\n"
        f"<content>\n{_ended(change.new)}</content>\n</write_to_file>"
    )


def _aider_show(path: str, text: str) -> str:
    return _turn("user", f"I have added this file to the chat:\n\n{path}\n```\n{_ended(text)}```\n") + _turn(
        "assistant", "Ok."
    )


def _aider_diff(change: Change) -> str:
    return "I will make the change.\n\n" + "\n".join(
        f"{change.path}\n```python\n<<<<<<< SEARCH\n{_ended(h.old)}=======\n{_ended(h.new)}>>>>>>> REPLACE\n```\n"
        for h in hunks(change.old, change.new, 3)
    )


def _aider_whole(change: Change) -> str:
    return f"I will make the change.\n\n{change.path}\n```\n{_ended(change.new)}```\n"


def _patch(change: Change) -> str:
    blocks = "".join(f"@@ {h.heading}".rstrip() + f"\n{h.marked}" for h in hunks(change.old, change.new, 3))
    patch = f"*** Begin Patch\n*** Update File: {change.path}\n{blocks}*** End Patch"
    return "I will make the change.\n" + _call("shell", {"command": ["apply_patch", patch]})


def _codex_show(path: str, text: str) -> str:
    call = _turn("assistant", _call("shell", {"command": ["cat", path]}))
    result = json.dumps({"output": text, "metadata": {"exit_code": 0}}, ensure_ascii=False)
    return call + _turn("user", f"<tool_response>\n{result}\n</tool_response>")


FORMATS = (
    Format("aider, search/replace", _aider_show, _aider_diff),
    Format("aider, whole file", _aider_show, _aider_whole),
    Format("Cline, replace_in_file", _cline_show, _cline_replace),
    Format("Cline, write_to_file", _cline_show, _cline_write),
    Format("Claude Code, Edit", _claude_show, _edit),
    Format("Claude Code, MultiEdit", _claude_show, _multi_edit),
    Format("Claude Code, Write", _claude_show, _write),
    Format("Codex, apply_patch", _codex_show, _patch),
)


def changes_of(repository: Path, skip: int, most: int) -> list[Change]:
    """Return changes of text files in the history of HEAD, the newest first, without the first `skip` of them."""
    found = []
    for _, message, path, old, new in edits_of(repository):
        if max(len(old), len(new)) <= MOST_BYTES:
            found.append(Change(path, message.strip(), old, new))
        if len(found) == skip + most + 1:  # One more is the earlier edit of the last.
            break
    return found[skip:]


def transcripts(changes: Sequence[Change], form: Format, vocabulary: Vocabulary) -> Iterator[Recorded]:
    """Yield a transcript of each change but the last."""
    for change, earlier in pairwise(changes):
        prompt = (
            _turn("system", f"You are a coding agent. You edit files in the format of {form.name}.")
            + _turn("user", earlier.message)
            + form.show(earlier.path, earlier.old)
            + _turn("assistant", form.write(earlier))
            + _turn("user", change.message)
            + form.show(change.path, change.old)
            + "<|im_start|>assistant\n"
        )
        tokens = [vocabulary.tokenize(text, special=True).tolist() for text in (prompt, form.write(change))]
        yield Recorded(change.path, tokens[0], tokens[1])


NAME = re.compile(r"\b[a-z_][a-z_0-9]{3,}\b")


def renames_of(folder: Path, skip: int, most: int) -> list[Change]:
    """Make changes in a regular sample of the medium-sized Python files of a folder.

    The most common name of a file's own functions and variables becomes another one.
    """
    files = [file for file in sorted(folder.rglob("*.py")) if 2_000 < file.stat().st_size < MOST_BYTES]
    found = []
    for file in files[:: max(1, len(files) // (4 * (skip + most + 1)))]:
        text = file.read_text("utf-8", "replace")
        own = set(re.findall(r"\b(?:def|for) ([a-z_][a-z_0-9]{3,})\b", text)) | set(
            re.findall(r"^\s+([a-z_][a-z_0-9]{3,}) = ", text, re.MULTILINE)
        )
        names = Counter(name for name in NAME.findall(text) if name in own)
        if not names or not 2 <= names.most_common(1)[0][1] <= 12:
            continue
        name = names.most_common(1)[0][0]
        other = "current_" + name.lstrip("_")
        new = re.sub(rf"\b{name}\b", other, text)
        path = str(file.relative_to(folder))
        found.append(Change(path, f"Rename {name} to {other} in {path}.", text, new))
        if len(found) == skip + most + 1:
            break
    return found[skip:]
