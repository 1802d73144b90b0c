"""Ask a model for a whole changed file, and find the file in its answer.

    stream = begin(engine, file, "rename width to w")
    for piece in stream: ...
    write_whole(file.target, changed(file, stream))

The old text is the prediction of the answer, so unchanged parts are drafted. The block of code in the answer may have
text before and after it, and blocks in it. The block that is most like the old file is taken. An answer without a block
counts as the file if it has a line of the old one. An answer without a file, or with a block without an end, is
refused. Nothing is written here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, NamedTuple

from rest_local.editing.text_file import TextFile
from rest_local.errors import EditRefused, printable

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from rest_local.decoding.engine import Engine
    from rest_local.decoding.request import RequestOptions
    from rest_local.decoding.streaming import ChatStream

_FENCE = re.compile(r"(?P<indent>[ \t]*)(?P<mark>`{3,}|~{3,})(?P<info>[^`]*)")
_SHORTEST = 3  # minimum marks of a fence
_INDENT = 3  # an end may be indented by so many characters more than its begin (CommonMark)
_SHOWN = 60  # the message quotes so many characters of an answer without a file


class NoFile(ValueError):
    """The answer has no file that can be used. The message says why."""


class _Fence(NamedTuple):
    """A line that begins or ends a block: its number, its indentation, its marks, and the text after them."""

    line: int
    indent: str
    mark: str
    info: str

    def ends(self, begin: _Fence) -> bool:
        """Return True if this is the end of a block with that begin."""
        alike = self.mark[0] == begin.mark[0] and len(self.mark) >= len(begin.mark)
        return alike and not self.info and len(self.indent) <= len(begin.indent) + _INDENT

    def nests(self, outer: _Fence) -> bool:
        """Return True if this begins a block within a block with that begin."""
        return bool(self.info) and self.mark[0] == outer.mark[0] and len(self.mark) >= len(outer.mark)


def fence_for(text: str, *, has_blocks: bool = False) -> str:
    """Return a fence longer than all fences in the text, and than usual ones if the answer may have blocks."""
    longest = max((len(fence.mark) for fence in _fences(text.split("\n"))), default=_SHORTEST if has_blocks else 0)
    return "`" * max(longest + 1, _SHORTEST)


def file_in(answer: str, old: str) -> str:
    """Return the new text of the file whose text was `old`, with a line feed at its end. Raises NoFile."""
    if not answer.strip():
        raise NoFile("the model gave an empty answer")
    answer = answer.replace("\r\n", "\n")
    lines = answer.split("\n")
    fences = _fences(lines)
    if not fences:
        return _plain(answer, old)
    blocks = _blocks(lines, fences)
    before = old.split("\n")
    block = blocks[0] if len(blocks) == 1 else max(blocks, key=lambda block: _likeness(block, before))
    if not any(map(str.strip, block)):
        raise NoFile("the block of code in the answer is empty")
    return "\n".join([*block, ""])


def _plain(answer: str, old: str) -> str:
    """Take an answer without a block for the file if it has a line of the old one with a letter or digit."""
    known = {line.strip() for line in old.split("\n") if any(map(str.isalnum, line))}
    if known and known.isdisjoint(line.strip() for line in answer.split("\n")):
        begin = " ".join(answer.split())
        shown = begin if len(begin) <= _SHOWN else f"{begin[:_SHOWN]}..."
        raise NoFile(f"the answer is not a file: {shown!r}")
    return answer.removesuffix("\n") + "\n"


def _fences(lines: Sequence[str]) -> list[_Fence]:
    found = ((place, _FENCE.fullmatch(line)) for place, line in enumerate(lines))
    return [_Fence(place, match["indent"], match["mark"], match["info"].strip()) for place, match in found if match]


def _blocks(lines: Sequence[str], fences: Sequence[_Fence]) -> list[Sequence[str]]:
    """Return the lines of each outermost block, and of all of them as one if there are several, because a block with
    blocks in it looks like that. Raises NoFile for a block without an end.
    """
    blocks: list[Sequence[str]] = []
    opened: list[_Fence] = []
    for fence in fences:
        if opened and fence.ends(opened[-1]):
            begin = opened.pop()
            if not opened:
                blocks.append(_between(lines, begin, fence))
        elif not opened or fence.nests(opened[-1]):
            opened.append(fence)
    first, last = fences[0], fences[-1]
    if opened and (not last.ends(first) or any(map(str.strip, lines[last.line + 1 :]))):
        raise NoFile("the block of code in the answer has no end")
    return blocks if len(blocks) == 1 and not opened else [*blocks, _between(lines, first, last)]


def _between(lines: Sequence[str], begin: _Fence, end: _Fence) -> Sequence[str]:
    """Return the lines between two fences, without the indentation of the first one (a block in a list)."""
    return [line.removeprefix(begin.indent) for line in lines[begin.line + 1 : end.line]]


def _likeness(block: Sequence[str], old: Sequence[str]) -> tuple[int, int]:
    """Count the common lines with a letter or digit, in order. Of equals the shorter block is better."""
    before, after = ([line for line in lines if any(map(str.isalnum, line))] for lines in (old, block))
    same = sum(match.size for match in SequenceMatcher(None, before, after).get_matching_blocks())
    return same, -len(block)


_MARKDOWN = (".md", ".markdown", ".mdx", ".rmd", ".qmd")  # an edit may add blocks of code to these


def begin(engine: Engine, file: TextFile, instruction: str, **options: Unpack[RequestOptions]) -> ChatStream:
    """Return the stream of the answer. `options` are fields of `Request`, except the prediction. Raises as
    `Engine.chat`. The conversation is one message with the file first, so that a second edit of it finds it in the KV
    cache. The prediction is the old text in its block.
    """
    suffix = file.path.suffix.lower()
    closing = fence_for(file.text, has_blocks=suffix in _MARKDOWN)
    opening = closing + _safe(suffix.removeprefix("."))  # the suffix names the language
    ended = file.text if file.text.endswith("\n") or not file.text else f"{file.text}\n"
    options["prediction"] = f"{opening}\n{ended}{closing}"
    text = (
        f"This is the file {_safe(file.path.as_posix())}:\n\n{options['prediction']}\n\n"
        f"Change it as follows:\n\n{instruction.strip()}\n\n"
        f"Answer with the whole changed file in one block of code, which begins with {opening} and ends with "
        f"{closing}, and with nothing else. Leave out nothing, and leave all other lines as they are."
    )
    return engine.chat([{"role": "user", "content": text}], **options)


def changed(file: TextFile, stream: ChatStream) -> bytes:
    """Return the new content of the file, from a stream that has ended. Raises EditRefused for an answer that a limit
    cut off, for one that was written without sight of the whole file, and for one without a whole file.
    """
    result = stream.result
    if result.finish_reason != "stop":
        cause = f"the answer was cut off after {len(result.tokens)} tokens"
        raise EditRefused(file.path, cause, "raise `n_ctx` or `max_tokens`, or give a smaller file")
    try:
        return file.with_text(file_in(stream.message["content"] or "", file.text))
    except NoFile as error:
        raise EditRefused(file.path, str(error), "say it in other words, or use a larger model") from error


def _safe(name: str) -> str:
    return printable(name).replace("`", "'")
