"""Where a model's reasoning ends and its answer begins: the tags, in what it says and in grammars.

Contract: reasoning is looked for at the beginning of an answer only, so that text about tags stays text. White space
around it is dropped. Reasoning that is never closed is all there is.
"""

from __future__ import annotations

from dataclasses import dataclass

from rest_local.chat.tools.source import Source, Wait
from rest_local.grammar.builder import Lark


@dataclass(frozen=True)
class Tags:
    """What opens and closes reasoning. `opened`: the prompt ends inside. `usual`: the model is one that reasons."""

    opening: str = "<think>"
    closing: str = "</think>"
    opened: bool = False
    usual: bool = False


_KNOWN = (("<|channel>thought", "<channel|>"), ("[THINK]", "[/THINK]"), ("<think>", "</think>"))


def tags_of(template: str, prompt: str) -> Tags:
    """By the template's text and the end of the rendered prompt."""
    opening, closing = next(((o, c) for o, c in _KNOWN if o in template or c in template), _KNOWN[-1])
    end = prompt.rstrip()
    return Tags(
        opening,
        closing,
        opened=end.endswith(opening),
        usual=(opening in template or closing in template) and not end.endswith(closing),
    )


def thoughts(source: Source, tags: Tags) -> Wait[None]:
    """Reads what the answer begins with."""
    if not tags.opened:
        source.begin()
        yield from source.space()
        if not (yield from source.starts(tags.opening)):
            source.rewind()
            return
        source.end()
    yield from source.space()
    yield from source.until((tags.closing,), source.reasoning, strip=True)
    yield from source.space()


def after_thoughts(lark: Lark, body: str, tags: Tags) -> str:
    """A grammar's body after reasoning of any length: needed where the prompt opened it, allowed where it is usual."""
    if not tags.opened and not tags.usual:
        return body
    thought = f"{lark.until(tags.closing)} /\\n{{0,2}}/"
    return f"{thought} {body}" if tags.opened else f"({lark.literal(tags.opening)} {thought})? {body}"
