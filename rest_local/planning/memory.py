"""Acceptance counts across runs: counts by evidence cell, one file for each model and vocabulary.

    recall(path, acceptance)      when an engine opens
    remember(path, acceptance)    when it closes

- `remember` adds only the counts of this run, under a lock that all files of a directory share, so several processes
  may write at the same time.
- A cell is stored with at most half the observations that it has in memory, and counts in a new run as at most
  RECALLED observations, so that the run's own text soon outweighs earlier runs.
- No error here is fatal. A damaged file, or one with other evidence cells, is renamed aside (`NAME.damaged-1`) with one
  warning; a file that cannot be read, locked or written costs one warning.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rest_local.drafting.candidates import CELLS_PER_SOURCE, LENGTHS, N_CELLS, ROWS, SHARES, SOURCES
from rest_local.errors import DatastoreLocked, DatastoreUnwritable
from rest_local.paths import write_atomically
from rest_local.planning.acceptance import HALVE_AT, Acceptance, Counts
from rest_local.retrieval.files import Files, locked
from rest_local.retrieval.format import sealed

log = logging.getLogger("rest_local.planning")

MAGIC = "rest-local acceptance"
FORMAT = 1


def _layout(n_sources: int) -> str:
    return f"{n_sources * CELLS_PER_SOURCE} {SOURCES[:n_sources]} {LENGTHS} {ROWS} {SHARES}"


LAYOUT = _layout(len(SOURCES))
"""The meaning of a cell number; counts of another layout are useless."""

READABLE = {_layout(n) for n in range(1, len(SOURCES) + 1)}
"""Layouts of earlier versions, too: a source that is added takes the numbers after the last one."""

KEPT = HALVE_AT / 2  # observations of a cell in the file, at most

RECALLED = 20.0
"""Observations of a recalled cell, at most. Speed-up of replays in sessions of 3 (MT-Bench, 60 answers) and 5 (chat,
200 answers) with history on the CPU's curve: 1.067 and 1.009 without a file, 1.063 and 1.011 with 20 observations,
1.061 and 1.011 with 200; MT-Bench on a flat curve 1.457, 1.455 and 1.444. So the value matters little next to the
shipped priors, and a large one does harm if sessions differ."""

WAIT_S = 2.0  # for the lock
_LARGEST = 1 << 22


def recall(path: Path, acceptance: Acceptance) -> None:
    """Add the counts of earlier runs, if there are any. Takes a millisecond."""
    try:
        counts = _read(path)
    except ValueError as error:
        _check_again(path, error)
        return
    except OSError as error:
        log.warning("%s cannot be read (%s); the acceptance counts of earlier runs are not used", path, error)
        return
    acceptance.add({cell: _scaled(hits, seen, RECALLED) for cell, (hits, seen) in counts.items()})


def remember(path: Path, acceptance: Acceptance) -> None:
    """Add the counts since `recall` or the last call to the file. Takes a few milliseconds; waits for the lock."""
    new = acceptance.drain()
    if not new:
        return
    try:
        with locked(path.parent, WAIT_S, make=Files()):
            try:
                old = _read(path)
            except ValueError as error:
                _set_aside(path, error)
                old = {}
            write_atomically(path, _serialised(_merged(old, new)), durable=True)
    except DatastoreLocked as error:
        log.warning("%s is locked by %s; the acceptance counts of this run are not stored", path, error.owner)
    except (DatastoreUnwritable, OSError) as error:
        cause = error.cause if isinstance(error, DatastoreUnwritable) else error
        log.warning("%s cannot be written (%s); the acceptance counts of this run are not stored", path, cause)


def _merged(old: Counts, new: Counts) -> dict[int, tuple[float, float]]:
    """The sums by cell, each scaled down to at most KEPT observations at the same rate."""
    merged = {}
    for cell in sorted({*old, *new}):
        before, now = old.get(cell, (0.0, 0.0)), new.get(cell, (0.0, 0.0))
        merged[cell] = _scaled(before[0] + now[0], before[1] + now[1], KEPT)
    return merged


def _scaled(hits: float, seen: float, most: float) -> tuple[float, float]:
    """The same rate with at most `most` observations."""
    weight = min(1.0, most / seen)
    return hits * weight, seen * weight


def _serialised(counts: Counts) -> bytes:
    cells = {str(cell): [round(hits, 3), round(seen, 3)] for cell, (hits, seen) in counts.items()}
    return sealed({"magic": MAGIC, "format": FORMAT, "layout": LAYOUT, "cells": cells})


def _read(path: Path) -> dict[int, tuple[float, float]]:
    """The counts of a file; none if there is no file. Raises OSError, or ValueError with what is wrong."""
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
    except FileNotFoundError:
        return {}
    if len(data) > _LARGEST:
        raise ValueError(f"larger than {_LARGEST} bytes")
    fields = _unsealed(data)
    if (fields.get("magic"), fields.get("format")) != (MAGIC, FORMAT):
        raise ValueError(f"format {str(fields.get('format'))[:20]} of {str(fields.get('magic'))[:40]!r}")
    if fields.get("layout") not in READABLE:
        raise ValueError("written by a version with other evidence cells")
    if not isinstance(fields.get("cells"), dict):
        raise ValueError("no cells")
    return {_cell(number): _pair(pair) for number, pair in fields["cells"].items()}


def _unsealed(data: bytes) -> Mapping[str, Any]:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError("not JSON") from error
    if not isinstance(fields, dict) or fields.pop("sha256", None) is None:
        raise ValueError("damaged")
    try:
        whole = sealed(fields) == data
    except (ValueError, RecursionError) as error:
        raise ValueError("damaged") from error
    if not whole:
        raise ValueError("it does not match its own checksum")
    return fields


def _cell(number: str) -> int:
    cell = int(number)
    if not 0 <= cell < N_CELLS:
        raise ValueError(f"cell {cell}")
    return cell


def _pair(pair: Any) -> tuple[float, float]:
    try:
        hits, seen = map(float, pair)
    except (TypeError, ValueError, OverflowError):
        hits = seen = math.nan
    if not (0 <= hits <= seen <= HALVE_AT and seen > 0):
        raise ValueError(f"counts {str(pair)[:40]}")
    return hits, seen


def _check_again(path: Path, error: ValueError) -> None:
    """Read the file again under the lock, because another process may have replaced it, and set it aside if needed."""
    try:
        with locked(path.parent, WAIT_S):
            try:
                _read(path)
            except ValueError as still:
                _set_aside(path, still)
    except (DatastoreLocked, DatastoreUnwritable, OSError):
        log.warning("%s: %s, and cannot be set aside; the acceptance counts of earlier runs are not used", path, error)


def _set_aside(path: Path, error: ValueError) -> None:
    """Rename the file; the caller holds the lock."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    path.rename(aside)
    log.warning("%s: %s; set aside as %s, starting from no counts", path, error, aside.name)
