"""The cells of one context on disk: sessions, and files of one text."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from rest_local.kv_cache import cell_format, slot_files
from rest_local.kv_cache.cell_files import SESSIONS, CellFiles
from rest_local.kv_cache.sessions import Sessions
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
    """Saves what the slots of a context hold, in parts of `part` tokens, and loads it."""

    def __init__(self, slots: Slots, made: Made, part: int, shares: bool) -> None:
        self._slots, self._made, self._part, self._shares = slots, made, part, shares

    def save(self, path: Path) -> bool:
        """Write the longest text that the KV cache holds to a file, for `load` of a later engine.

        Returns False, with a warning in the log, where that fails or nothing is held. Only while no request runs. Takes
        the space of the cells.
        """
        slot = max(self._slots.slots, key=lambda slot: slot.n_past)
        problem = "there are none"
        try:
            if slot.n_past:
                slot_files.save(slot, path, self._made, self._part, self._shares)
                return True
        except OSError as error:
            problem = error.strerror or str(error)
        log.warning("the cells of the conversation are not kept in %s: %s", path, problem)
        return False

    def load(self, path: Path) -> int:
        """Have the text of `save` in the KV cache, so that a prompt that begins with it need not be evaluated.

        Returns how many tokens it has. Cells that are damaged, of another model, of other settings or of another build
        of llama.cpp are left out with a warning in the log. Only while no request runs.
        """
        try:
            return slot_files.load(self._slots.slots[0], path, self._made)
        except FileNotFoundError:
            return 0
        except (OSError, cell_format.Unusable) as error:
            log.warning("the cells in %s are not used, the text is evaluated again: %s", path, error)
            return 0
