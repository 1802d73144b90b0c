"""What was accepted, kept across runs: counts by evidence cell, one file a model and vocabulary.

    recall(path, acceptance)      when an engine opens
    remember(path, acceptance)    when it closes

Only what this run counted is added, under a lock that all files of a directory share, so processes may write at once.
A cell is kept with at most half the weight that the planner's own memory has, and counts in a new run as TRUST
observations at most, so that its own text soon outweighs what earlier runs saw. Nothing here is ever fatal: a file that
is damaged, or of other evidence cells, is renamed aside (`NAME.damaged-1`) with one warning; what cannot be read,
locked or written costs a warning.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rest_local.drafting.candidates import LENGTHS, N_CELLS, ROWS, SHARES, SOURCES
from rest_local.errors import DatastoreLocked, DatastoreUnwritable
from rest_local.paths import write_atomically
from rest_local.planning.acceptance import MEMORY, Acceptance, Counts
from rest_local.retrieval.files import Files, locked
from rest_local.retrieval.format import sealed

log = logging.getLogger("rest_local.planning")

MAGIC = "rest-local acceptance"
FORMAT = 1
LAYOUT = f"{N_CELLS} {SOURCES} {LENGTHS} {ROWS} {SHARES}"
"""What a cell number means: counts of another layout are of no use."""

KEPT = MEMORY / 2

TRUST = 20.0
"""Replays in sessions of 3 (MT-Bench, 60 answers) and 5 (chat, 200 answers) with history, by the CPU's curve: 1.067
and 1.009 without memory, 1.063 and 1.011 with a trust of 20, 1.061 and 1.011 with 200; MT-Bench on a flat curve 1.457,
1.455, 1.444. So it matters little next to the shipped priors, and more trust does harm where sessions differ."""

WAIT_S = 2.0
_LARGEST = 1 << 22


def recall(path: Path, acceptance: Acceptance) -> None:
    """Add what earlier runs counted, if anything. A millisecond."""
    try:
        counts = _read(path)
    except ValueError as error:
        _look_again(path, error)
        return
    except OSError as error:
        log.warning("%s cannot be read (%s); what earlier runs accepted is not used", path, error)
        return
    acceptance.add({cell: _scaled(hits, seen, TRUST) for cell, (hits, seen) in counts.items()})


def remember(path: Path, acceptance: Acceptance) -> None:
    """Add what was counted since `recall` or the last call to the file. A few milliseconds; waits for the lock."""
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
        log.warning("%s is locked by %s; what this run accepted is not kept", path, error.owner)
    except (DatastoreUnwritable, OSError) as error:
        cause = error.cause if isinstance(error, DatastoreUnwritable) else error
        log.warning("%s cannot be written (%s); what this run accepted is not kept", path, cause)


def _merged(old: Counts, new: Counts) -> dict[int, tuple[float, float]]:
    """The sums by cell, each brought down to KEPT observations in its own proportions."""
    merged = {}
    for cell in sorted({*old, *new}):
        before, now = old.get(cell, (0.0, 0.0)), new.get(cell, (0.0, 0.0))
        merged[cell] = _scaled(before[0] + now[0], before[1] + now[1], KEPT)
    return merged


def _scaled(hits: float, seen: float, most: float) -> tuple[float, float]:
    """The same rate, from at most so many observations."""
    weight = min(1.0, most / seen)
    return hits * weight, seen * weight


def _serialised(counts: Counts) -> bytes:
    cells = {str(cell): [round(hits, 3), round(seen, 3)] for cell, (hits, seen) in counts.items()}
    return sealed({"magic": MAGIC, "format": FORMAT, "layout": LAYOUT, "cells": cells})


def _read(path: Path) -> dict[int, tuple[float, float]]:
    """The counts of a file, none where there is no file. Raises OSError, and ValueError saying what is wrong."""
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
    if fields.get("layout") != LAYOUT:
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
    if not (0 <= hits <= seen <= MEMORY and seen > 0):
        raise ValueError(f"counts {str(pair)[:40]}")
    return hits, seen


def _look_again(path: Path, error: ValueError) -> None:
    """Under the lock: another process may have put the file right meanwhile."""
    try:
        with locked(path.parent, WAIT_S):
            try:
                _read(path)
            except ValueError as still:
                _set_aside(path, still)
    except (DatastoreLocked, DatastoreUnwritable, OSError):
        log.warning("%s: %s, and cannot be set aside; what earlier runs accepted is not used", path, error)


def _set_aside(path: Path, error: ValueError) -> None:
    """Renames the file, under the lock."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    path.rename(aside)
    log.warning("%s: %s; set aside as %s, starting anew", path, error, aside.name)
