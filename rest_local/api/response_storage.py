"""Responses that later requests may continue or read: kept for a day, and bounded in number and bytes.

A response is kept as the items that its turn added, its own fields, and the id of the response before it. So the size
of a conversation is proportional to its length.

A conversation is a directory and a response is a file in it, readable by this user alone and written atomically. It
survives the process of a model. Any thread may use it, and several processes may share a folder. An id has the name of
its conversation (16 hex digits) and its own (32), both random:

    resp_0123456789abcdef0123456789abcdef0123456789abcdef   the response
    msg_0123456789abcdef0123456789abcdef0123456789abcdef_o2  the third item of its output (i2: of its input)

Contract: a file that cannot be read, is incomplete or belongs to another API key counts as forgotten. When the bounds
are passed, whole conversations are forgotten, the one longest unused first. A response that cannot be written (a full
disk) is logged and forgotten; its answer is not lost.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import re
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

from rest_local.paths import write_atomically

log = logging.getLogger("rest_local.server")

SECONDS = 24 * 3600.0  # a conversation that has not grown for so long is forgotten
MAX_BYTES = 256 << 20
MAX_RESPONSES = 4096
SWEEP_EVERY = 64  # responses
SWEEP_SECONDS = 600.0
_VERSION = 1
_TRIES = 5
_RESPONSE = re.compile(r"resp_([0-9a-f]{16})([0-9a-f]{32})")
_ITEM = re.compile(r"[a-z]+_([0-9a-f]{48})_[io][0-9]+")


def new_response_id(previous: str | None = None) -> str:
    """Return an id that cannot be guessed, in the conversation of the response `previous`."""
    found = _RESPONSE.fullmatch(previous or "")
    return f"resp_{found[1] if found else secrets.token_hex(8)}{secrets.token_hex(16)}"


def item_id(prefix: str, response_id: str, where: str, number: int) -> str:
    """Return the id of an item. `where` is `i` for the input, `o` for the output."""
    return f"{prefix}_{response_id[5:]}_{where}{number}"


@dataclass(frozen=True)
class KeptResponse:
    id: str
    previous: str | None  # id of the response that it continues
    owner: str  # distinguishes API keys, see `server.settings.owner_of`
    added: list[dict[str, Any]]  # the new input items of its request
    response: dict[str, Any]

    @property
    def output(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = self.response["output"]
        return items

    def to_bytes(self) -> bytes:
        return to_json({"version": _VERSION, **vars(self)}, inf_nan_mode="null")

    @staticmethod
    def from_bytes(data: bytes) -> KeptResponse | None:
        """Parse a file. Returns None if it is incomplete or of another version."""
        try:
            value = from_json(data)
            kept = KeptResponse(*(value[name] for name in ("id", "previous", "owner", "added", "response")))
            whole = value["version"] == _VERSION and all(isinstance(item, dict) for item in (*kept.added, *kept.output))
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        return kept if whole and isinstance(kept.id, str) and isinstance(kept.owner, str) else None


class ResponseStorage:
    """The responses of a server. No other server may use its `folder`. None makes a temporary one."""

    def __init__(
        self, folder: Path | None, *, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES,
        seconds: float = SECONDS,
    ) -> None:  # fmt: skip
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="rest-local-"))
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._path = folder / "responses"
        self._max_responses, self._max_bytes, self._seconds = max_responses, max_bytes, seconds
        self._unswept, self._unswept_bytes, self._swept = SWEEP_EVERY, 0, 0.0  # the first call of `sweep` sweeps

    def get(self, response_id: str, owner: str) -> KeptResponse | None:
        """Return a response, or None if it is unknown, forgotten, damaged or belongs to another owner."""
        path = self._file(response_id)
        try:
            kept = KeptResponse.from_bytes(path.read_bytes()) if path is not None else None
        except OSError:
            return None
        if kept is None or kept.id != response_id or not hmac.compare_digest(kept.owner.encode(), owner.encode()):
            return None
        return kept

    def conversation(self, response_id: str, owner: str) -> list[KeptResponse] | None:
        """Return the response and those before it in order, or None if one of them is forgotten."""
        found: list[KeptResponse] = []
        wanted: str | None = response_id
        while wanted is not None:
            kept = self.get(wanted, owner)
            if kept is None or len(found) > MAX_RESPONSES:
                return None
            found.append(kept)
            wanted = kept.previous
        return found[::-1]

    def item(self, reference: str, owner: str) -> dict[str, Any] | None:
        """Return a stored item by its id, or None if it is unknown or forgotten."""
        found = _ITEM.fullmatch(reference)
        kept = self.get(f"resp_{found[1]}", owner) if found else None
        items = [*kept.added, *kept.output] if kept is not None else []
        return next((item for item in items if item.get("id") == reference), None)

    def _file(self, response_id: str) -> Path | None:
        found = _RESPONSE.fullmatch(response_id)
        return self._path / found[1] / f"{found[2]}.json" if found else None

    def keep(self, kept: KeptResponse) -> bool:
        path, data = self._file(kept.id), kept.to_bytes()
        assert path is not None
        self._unswept += 1
        self._unswept_bytes += len(data)
        failed: OSError | None = None
        for _ in range(_TRIES):
            try:
                self._path.mkdir(mode=0o700, exist_ok=True)
                path.parent.mkdir(mode=0o700, exist_ok=True)
                write_atomically(path, data)
            except (FileNotFoundError, FileExistsError) as error:  # another process removed the directory meanwhile
                failed = error
            except OSError as error:
                failed = error
                break
            else:
                return True
        log.warning("a response is not kept: %s", failed)
        return False

    def remove(self, response_id: str) -> None:
        """Forget one response. Responses that continue it cannot be continued any more."""
        if (path := self._file(response_id)) is not None:
            with contextlib.suppress(OSError):
                path.unlink()
            with contextlib.suppress(OSError):
                path.parent.rmdir()  # fails if others are left

    def sweep(self) -> None:
        """Forget what is too old or too much, if enough was added or enough time has passed since the last sweep."""
        recent = time.monotonic() - self._swept < SWEEP_SECONDS
        if recent and self._unswept < SWEEP_EVERY and self._unswept_bytes < self._max_bytes // 16:
            return
        self._unswept, self._unswept_bytes, self._swept = 0, 0, time.monotonic()
        chains = sorted(self.chains())
        count, size = sum(chain[2] for chain in chains), sum(chain[3] for chain in chains)
        oldest = time.time() - self._seconds
        for grown, chain, responses, taken in chains:
            if grown >= oldest and count <= self._max_responses and size <= self._max_bytes:
                break
            shutil.rmtree(self._path / chain, ignore_errors=True)
            count, size = count - responses, size - taken

    def chains(self) -> list[tuple[float, str, int, int]]:
        """Return when each conversation last grew (seconds since 1970), its name, number of responses and bytes."""
        found = []
        for chain in _entries(self._path):
            states = [state for entry in _entries(Path(chain.path)) if (state := _state(entry)) is not None]
            newest = max((state.st_mtime for state in states), default=0.0)
            found.append((newest, chain.name, len(states), sum(state.st_size for state in states)))
        return found


def _entries(path: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            yield from entries
    except OSError:
        return  # another process of this server has just forgotten it


def _state(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat()
    except OSError:
        return None


def items_of(conversation: Iterable[KeptResponse]) -> list[dict[str, Any]]:
    return [item for kept in conversation for item in (*kept.added, *kept.output)]
