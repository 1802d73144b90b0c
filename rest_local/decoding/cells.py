"""The cells of one context on disk: sessions, and the text of a conversation in a file of its own."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path

from rest_local.kv_cache.cell_files import SESSIONS, CellFiles
from rest_local.kv_cache.cell_format import Head, Reader, Unusable, write
from rest_local.kv_cache.cell_states import begin_anew, load_part, load_states, part_of, states_of
from rest_local.kv_cache.sessions import Sessions
from rest_local.kv_cache.slot import Slot
from rest_local.kv_cache.slots import Slots
from rest_local.paths import cache_dir

log = logging.getLogger("rest_local.engine")


# The settings of the context that cells on disk are from.
Made = Mapping[str, str]


def open_sessions(made: Made, limit: int, part: int, shares: bool) -> tuple[Sessions | None, str]:
    """Keep the cells of texts in the user's cache, `limit` bytes for all models; else return a warning."""
    try:
        return Sessions(CellFiles(cache_dir() / SESSIONS, made, limit, part=part), shares), ""
    except OSError as error:
        return None, f"no sessions are kept on disk: {error.filename}: {error.strerror}"


class CellStore:
    """Saves what the slots of a context hold, in parts of `part` tokens, and loads it. Only while no request runs."""

    def __init__(self, slots: Slots, made: Made, part: int, shares: bool) -> None:
        self._slots, self._made, self._part, self._shares = slots, made, part, shares

    def save(self, path: Path) -> bool:
        """Write the longest text that the KV cache holds to a file, for `load` of a later engine.

        Returns False, with a warning in the log, where that fails or nothing is held. Takes the space of the cells.
        """
        slot = max(self._slots.slots, key=lambda slot: slot.n_past)
        problem = "there are none"
        try:
            if slot.n_past:
                self._write(slot, path)
                return True
        except OSError as error:
            problem = error.strerror or str(error)
        log.warning("the cells of the conversation are not kept in %s: %s", path, problem)
        return False

    def _write(self, slot: Slot, path: Path) -> None:
        """Write the text in parts, or as states where it cannot be cut back or its beginning has left a window."""
        tokens = slot.tokens[: slot.n_past]
        if self._shares and min(tokens) >= 0 and part_of(slot, 0, min(self._part, len(tokens))):
            ends = [*range(self._part, len(tokens), self._part), len(tokens)]
            parts = (part_of(slot, begin, end) for begin, end in zip([0, *ends], ends, strict=False))
            write(path, Head(self._made, tokens, "parts", ends), parts)
            return
        states = states_of(slot, sys.maxsize)
        assert states is not None
        marks = [n for n, _ in states]
        write(path, Head(self._made, tokens, "states", marks), (state for _, state in states))

    def load(self, path: Path) -> int:
        """Have the text of `save` in the KV cache, so that a prompt that begins with it need not be evaluated.

        Returns how many tokens it has. Cells that are damaged, of another model, of other settings or of another build
        of llama.cpp are left out with a warning in the log.
        """
        slot = self._slots.slots[0]
        try:
            with Reader(path) as reader:
                reader.check(self._made, slot.backend.n_ctx)
                begin_anew(slot, list(reader.head.tokens))
                try:
                    self._read(slot, reader)
                except BaseException:
                    slot.clear()
                    raise
        except FileNotFoundError:
            return 0
        except (OSError, Unusable) as error:
            log.warning("the cells in %s are not used, the text is evaluated again: %s", path, error)
            return 0
        return slot.n_past

    def _read(self, slot: Slot, reader: Reader) -> None:
        records = zip(reader.head.marks, reader.records(), strict=True)
        if reader.head.kind == "states":
            loaded = load_states(slot, list(records), len(slot.tokens))
        else:
            loaded = all(load_part(slot, record, end) for end, record in records)
        if not loaded:
            raise Unusable("there is no room for it, or it is of another context")
