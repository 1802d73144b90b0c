"""A process that keeps datastores up to date for a command that decodes: `rest_local.cli.indexer` starts it.

Reads one line of JSON from stdin: `model`, the file whose vocabulary counts; `names`, datastores to keep up to date;
`code`, a list of [name, path], datastores to build first where they lack an index. Writes lines of JSON to stdout.

It has the lowest priority, and ends when its stdin does: at the latest with the process that started it, also if that
is killed.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rest_local.errors import DatastoreExists, DatastoreLocked, DatastoreNotFound, RestLocalError, printable

if TYPE_CHECKING:
    from rest_local.llama.vocabulary import Vocabulary
    from rest_local.retrieval.format import Manifest
    from rest_local.retrieval.update.watching import Target

NICE = 19
END_S = 5.0  # for an update to be undone, once the parent is gone
LOCKED_S = 0.5  # between two attempts while another process builds the same datastore


class _Told(logging.Handler):
    """Warnings of the library, as events."""

    def emit(self, record: logging.LogRecord) -> None:
        tell("warning", message=record.getMessage())


def tell(event: str, **fields: Any) -> None:
    """One line for the parent."""
    print(json.dumps({"event": event, **fields}), flush=True)


def main() -> None:
    request = json.loads(sys.stdin.readline())
    if hasattr(os, "nice"):
        os.nice(NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at the terminal is for the parent
    stop = threading.Event()
    threading.Thread(target=_end_with_stdin, args=(stop,), name="parent", daemon=True).start()
    logging.getLogger("rest_local").addHandler(_Told(logging.WARNING))
    try:
        _work(request, stop)
    except RestLocalError as error:
        tell("failed", message=printable(str(error)))
    except KeyboardInterrupt:  # raised by watchfiles for SIGTERM
        pass


def _end_with_stdin(stop: threading.Event) -> None:
    while sys.stdin.buffer.read(1 << 12):
        pass
    threading.Timer(END_S, os._exit, (0,)).start()  # datastores survive a kill at any moment
    stop.set()
    signal.raise_signal(signal.SIGTERM)


def _work(request: dict[str, Any], stop: threading.Event) -> None:
    from rest_local.cli.index.group import open_vocabulary
    from rest_local.cli.index.watch import end_at_sigterm
    from rest_local.retrieval.update.updating import update
    from rest_local.retrieval.update.watching import Watcher

    end_at_sigterm(stop)
    model = Path(request["model"])
    with open_vocabulary(model) as vocabulary:
        for name, root in request["code"]:
            build(name, root, model, vocabulary, stop)
        names = [*request["names"], *(name for name, _ in request["code"])]
        awaited = Awaited(names, vocabulary)
        Watcher((), update, lambda commit: tell("commit", **commit.to_dict()), more=awaited.more).run(stop)


def build(name: str, root: str, model: Path, vocabulary: Vocabulary, stop: threading.Event) -> None:
    """Build what the datastore lacks for this vocabulary. Another process may do so at the same time."""
    from rest_local.retrieval.building.indexing import build_datastore
    from rest_local.retrieval.home import datastore_path

    manifest = manifest_of(datastore_path(name), vocabulary)
    while manifest is None and not stop.is_set():
        try:
            recipe = {"model": str(model.absolute())}
            manifest = build_datastore(name, [root], vocabulary=vocabulary, recipe=recipe, replace=False).manifest
        except DatastoreLocked:
            stop.wait(LOCKED_S)
            manifest = manifest_of(datastore_path(name), vocabulary)
        except DatastoreExists:
            manifest = manifest_of(datastore_path(name), vocabulary)
    if manifest is not None:
        tokens, documents = (sum(getattr(one, what) for one in manifest.segments) for what in ("tokens", "documents"))
        tell("ready", name=name, tokens=tokens, documents=documents)


def manifest_of(path: Path, vocabulary: Vocabulary) -> Manifest | None:
    """The index of a datastore for this vocabulary. Raises DatastoreError where it cannot be read."""
    from rest_local.retrieval.home import find, read_manifest

    try:
        manifest = read_manifest(find(path, vocabulary.hash))
    except DatastoreNotFound:
        return None
    return manifest if manifest.vocabulary.hash == vocabulary.hash else None


class Awaited:
    """Datastores whose index for a vocabulary is watched as soon as there is one."""

    def __init__(self, names: Sequence[str], vocabulary: Vocabulary) -> None:
        self._names, self._vocabulary = list(dict.fromkeys(names)), vocabulary

    def more(self) -> list[Target] | None:
        """Those that have come since the last call."""
        found = list(self._found())
        self._names = [name for name in self._names if name not in {target.name for target in found}]
        return found if found or self._names else None

    def _found(self) -> Iterator[Target]:
        from rest_local.retrieval.format import Manifest
        from rest_local.retrieval.home import datastore_path, manifests
        from rest_local.retrieval.update.watching import Target, walks_of

        for name in list(self._names):
            path = datastore_path(name)
            for manifest in manifests(path).values():
                if isinstance(manifest, Manifest) and manifest.vocabulary.hash == self._vocabulary.hash:
                    if walks_of(manifest.recipe):
                        yield Target(name, path, self._vocabulary)
                    else:
                        self._names.remove(name)
                        tell("warning", message=f"datastore {name}: was not built from files, so it is not watched")


if __name__ == "__main__":
    main()
