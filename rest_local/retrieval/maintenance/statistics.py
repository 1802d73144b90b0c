"""Describe an index in numbers that a user asks for: documents, files, tokens, sizes, and changes since."""

from __future__ import annotations

import datetime
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.documents import FileState, alive

TOP = 10  # entries of each list
_TIERS = (1 << 16, 1 << 20, 1 << 24, 1 << 26)  # upper ends, in tokens


def statistics(directory: Path, *, changes: bool = False) -> dict[str, Any]:
    """Return the statistics of the index in `directory`, JSON-ready. Reads the tables of the documents and of their
    files, not the text: O(documents).

    - documents, tokens: those that are not deleted; tokens include one separator for each document
    - dead: deleted ones that wait for a merge
    - files: those that were read; duplicates: files whose text another file gave; 0 without states
    - tiers: segments by number of tokens; bytes: on disk by kind of file; age_s: seconds since the commit
    - largest, extensions, folders: the first TOP by tokens; folders are those below the one that holds all documents
    - changed: only with `changes`, which looks at the size and the time of every file: `changed_since`

    Raises DatastoreNotFound, DatastoreCorrupt, DatastoreVersion.
    """
    sizes: list[tuple[str, int]] = []  # (name, tokens with the separator) of each live document
    states: list[FileState] = []
    by_kind: Counter[str] = Counter()
    duplicates = 0
    with Datastore.open(directory, mmap=True) as store:
        entries, info = store.manifest.segments, store.info()
        for index, entry in enumerate(entries):
            by_kind.update({kind: file.size for kind, file in entry.files.items()})
            table, held = store.table(index), store.states(index)
            for number in np.flatnonzero(alive(entry.dead, entry.documents)).tolist():
                sizes.append((table.name(number), table.start(number + 1) - table.start(number)))
            if held is not None:
                live = np.flatnonzero(alive(entry.gone, len(held)))
                states += [held[number] for number in live.tolist()]
                duplicates += len(live) - len(np.unique(held.documents[live]))
    tokens, on_disk = sum(size for _, size in sizes), info["bytes"]
    files = len(states) or len(sizes)
    found = {
        **{key: info[key] for key in ("path", "created", "revision", "vocabulary", "recipe")},
        "age_s": _age(info["created"]),
        "documents": len(sizes),
        "files": files,
        "duplicates": duplicates,
        "tokens": tokens,
        "dead": {
            "documents": sum(entry.documents for entry in entries) - len(sizes),
            "tokens": sum(entry.tokens for entry in entries) - tokens,
        },
        "segments": len(entries),
        "tiers": _tiers([entry.tokens for entry in entries]),
        "bytes": {"all": on_disk, **by_kind},
        "bytes_a_token": round(on_disk / tokens, 3),
        **_tops(sizes),
    }
    return {**found, "changed": changed_since(states)} if changes else found


def changed_since(states: list[FileState]) -> dict[str, int]:
    """Count the recorded files that look "same", "changed", "missing" and "unknown", at the cost of one `stat` for
    each. This is an estimate: a file of the same size and time is the same, and one of the same size with an uncertain
    time is unknown. New files are not looked for; `rest-local index update` finds them.
    """
    found = Counter(_change(state) for state in states)
    return {key: found[key] for key in ("same", "changed", "missing", "unknown")}


def _change(state: FileState) -> str:
    try:
        now = os.stat(state.name)
    except (OSError, ValueError):
        return "missing"
    if now.st_size != state.size:
        return "changed"
    if not state.mtime_ns:
        return "unknown"
    return "same" if now.st_mtime_ns == state.mtime_ns else "changed"


def _tiers(tokens: list[int]) -> list[dict[str, int | None]]:
    """Group segments and their tokens by size; `up_to` is None for the largest."""
    tiers: list[dict[str, int | None]] = []
    lower = 0
    for upper in (*_TIERS, None):
        inside = [count for count in tokens if lower < count and (upper is None or count <= upper)]
        if inside:
            tiers.append({"up_to": upper, "segments": len(inside), "tokens": sum(inside)})
        lower = upper or 0
    return tiers


def _tops(sizes: list[tuple[str, int]]) -> dict[str, list[dict[str, Any]]]:
    """Make the lists `largest`, `extensions` and `folders`."""
    names = [os.path.dirname(name) for name, _ in sizes]
    comparable = len({os.path.isabs(name) for name in names}) == 1
    shared = os.path.commonpath(names) if comparable else ""
    found = {"largest": Counter(dict(sizes)), "extensions": Counter[str](), "folders": Counter[str]()}
    for name, tokens in sizes:
        found["extensions"][os.path.splitext(name)[1] or os.path.basename(name)] += tokens
        below = os.path.relpath(name, shared) if shared else name
        first, separator, _ = below.partition(os.sep)  # the folder right below `shared`, or `shared` itself
        found["folders"][os.path.join(shared, first) if separator else shared or "."] += tokens
    tops = {key: sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:TOP] for key, counts in found.items()}
    return {key: [{"name": name, "tokens": count} for name, count in top] for key, top in tops.items()}


def _age(created: str) -> float | None:
    """Return the seconds since a time in a manifest, None if it is invalid. Never negative: clocks differ."""
    try:
        then = datetime.datetime.fromisoformat(created)
        now = datetime.datetime.now(datetime.timezone.utc)
        return max((now - then).total_seconds(), 0.0) if then.tzinfo else None
    except ValueError:
        return None
