"""The text of a slot in a file of its own, for a conversation of `chat`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from rest_local import stop
from rest_local.kv_cache.cell_format import Head, Reader, Unusable, write
from rest_local.kv_cache.cell_states import begin_anew, load_part, load_states, part_of, states_of
from rest_local.kv_cache.slot import Slot


def save(slot: Slot, path: Path, made: Mapping[str, str], part: int, shares: bool) -> None:
    """Write the text of a slot to a file: in parts of `part` tokens where it can be cut, else as states.

    Raises OSError.
    """
    tokens = slot.tokens[: slot.n_past]
    if shares and min(tokens) >= 0 and part_of(slot, 0, min(part, len(tokens))):
        head = Head(made, tokens, "parts", [*range(part, len(tokens), part), len(tokens)])
        write(path, head, _parts(slot, head.marks))
        return
    states = states_of(slot, sys.maxsize)
    assert states is not None
    write(path, Head(made, tokens, "states", [n for n, _ in states]), [state for _, state in states])


def _parts(slot: Slot, marks: Sequence[int]) -> Iterator[bytes]:
    for begin, end in zip([0, *marks], marks, strict=False):
        stop.check()
        yield part_of(slot, begin, end)


def load(slot: Slot, path: Path, made: Mapping[str, str]) -> int:
    """Have the text of a file in a slot, in the place of what it held, and return how many tokens it has.

    Raises OSError, and Unusable; the slot is empty then, or as it was.
    """
    with Reader(path) as reader:
        reader.check(made, slot.backend.n_ctx)
        head, records = reader.head, zip(reader.head.marks, reader.records(), strict=True)
        calls: Iterable[Callable[[], bool]] = (partial(load_part, slot, record, end) for end, record in records)
        if head.kind == "states":
            calls = [partial(load_states, slot, list(records), len(head.tokens))]
        try:
            begin_anew(slot, list(head.tokens))
            for call in calls:
                stop.check()
                if not call():
                    raise Unusable("there is no room for it, or it is of another context")
        except BaseException:
            slot.clear()
            raise
        return len(head.tokens)
