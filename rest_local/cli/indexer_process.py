"""The process that keeps datastores up to date for a command that decodes, started by `rest_local.cli.indexer`.

It reads one line of JSON from stdin. `model` is the file whose vocabulary counts, `names` are the datastores to keep up
to date, and `code` is a list of [name, path] of datastores to build first if they lack an index. It writes lines of
JSON to stdout, and has the lowest priority. It ends when its stdin does, so at the latest with the process that started
it, even a killed one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rest_local.cli.index import group
from rest_local.errors import (
    DatastoreError,
    DatastoreExists,
    DatastoreLocked,
    DatastoreNotFound,
    RestLocalError,
    printable,
)

if TYPE_CHECKING:
    from rest_local.llama.vocabulary import Vocabulary
    from rest_local.retrieval.format import Manifest


NICE = 19
END_S = 5.0  # Once the parent is gone, an update has so many seconds to be undone.
LOCKED_S = 0.5  # Try again after so many seconds if another process builds the same datastore.


def tell(event: str, **fields: Any) -> None:
    """Print one line for the parent."""
    print(json.dumps({"event": event, **fields}), flush=True)


def main() -> None:
    import logging  # At the top it would add a tenth to the time of --help.

    class WarningsHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            tell("warning", message=record.getMessage())

    request = json.loads(sys.stdin.readline())
    os.nice(NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at the terminal is for the parent.
    stop = threading.Event()
    threading.Thread(target=_end_with_stdin, args=(stop,), name="parent", daemon=True).start()
    logging.getLogger("rest_local").addHandler(WarningsHandler(logging.WARNING))
    try:
        _work(request, stop)
    except RestLocalError as error:
        tell("failed", message=printable(str(error)))
    except KeyboardInterrupt:  # watchfiles raises it for SIGTERM.
        pass


def _end_with_stdin(stop: threading.Event) -> None:
    while sys.stdin.buffer.read(1 << 12):
        pass
    threading.Timer(END_S, os._exit, (0,)).start()  # Datastores survive a kill at any moment.
    stop.set()
    signal.raise_signal(signal.SIGTERM)


def _work(request: dict[str, Any], stop: threading.Event) -> None:
    from rest_local.retrieval.update.updating import update
    from rest_local.retrieval.update.watching import Target, Watcher, walks_of

    def end(number: int, frame: FrameType | None) -> None:
        """End at once. An unfinished write is undone."""
        stop.set()
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, end)
    model = Path(request["model"])
    with group.open_vocabulary(model) as vocabulary:
        for name, root in request["code"]:
            build(name, root, model, vocabulary, stop)
        awaited = {*request["names"], *(name for name, _ in request["code"])}

        def more() -> list[Target] | None:
            """Return the datastores whose index for the vocabulary has come since the last call."""
            found = []
            for name in sorted(awaited):
                with suppress(DatastoreError):  # A damaged one may be repaired later.
                    if manifest := manifest_of(group.path_of(name), vocabulary):
                        awaited.remove(name)
                        if walks_of(manifest.recipe):
                            found.append(Target(name, group.path_of(name), vocabulary))
                        else:
                            tell("warning", message=f"datastore {name}: was not built from files, so it is not watched")
            return found if found or awaited else None

        Watcher((), update, lambda commit: tell("commit", **commit.to_dict()), more=more).run(stop)


def build(name: str, root: str, model: Path, vocabulary: Vocabulary, stop: threading.Event) -> None:
    """Build what the datastore lacks for this vocabulary. Another process may do so at the same time."""
    from rest_local.retrieval.building.indexing import build_datastore

    recipe = {"model": str(model.absolute())}
    while not (manifest := manifest_of(group.path_of(name), vocabulary)) and not stop.is_set():
        try:
            build_datastore(name, [root], vocabulary=vocabulary, recipe=recipe, replace=False)
        except DatastoreLocked:
            stop.wait(LOCKED_S)
        except DatastoreExists:
            continue
    if manifest is not None:
        tokens, documents = (sum(getattr(one, what) for one in manifest.segments) for what in ("tokens", "documents"))
        tell("ready", name=name, tokens=tokens, documents=documents)


def manifest_of(path: Path, vocabulary: Vocabulary) -> Manifest | None:
    """Return the index of a datastore for this vocabulary. Raises DatastoreError if it cannot be read."""
    from rest_local.retrieval.home import find, read_manifest

    try:
        manifest = read_manifest(find(path, vocabulary.hash))
    except DatastoreNotFound:
        return None
    return manifest if manifest.vocabulary.hash == vocabulary.hash else None
