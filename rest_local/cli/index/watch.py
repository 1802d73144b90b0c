"""`index watch`: keep datastores up to date with the files they were built from.

`main` is the process that does so for a command that decodes, started by `rest_local.cli.indexer`. It reads one line of
JSON from stdin. `model` is the file whose vocabulary counts, `names` are the datastores to keep up to date, and `code`
is a list of [name, path] of datastores to build first if they lack an index. It writes lines of JSON to stdout, and has
the lowest priority. It ends when its stdin does, so at the latest with the process that started it, even a killed one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from rest_local.cli import completion
from rest_local.cli.index import group
from rest_local.cli.index.group import index
from rest_local.cli.sections import option
from rest_local.cli.terminal import counted, json_option, print_json, say, warn
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
    from rest_local.retrieval.update.watching import Commit, Target


@index.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=completion.datastores)
@option(
    "--poll SECONDS",
    "Look at all files every SECONDS, if the system reports no changes, as on network drives.",
    to="poll_s",
    type=click.FloatRange(min=0.1),
    configurable=False,
)
@json_option
def watch(names: tuple[str, ...], poll_s: float | None, as_json: bool) -> None:
    """Keep datastores up to date with the files they were built from, until Ctrl-C.

    A saved file can be drafted from a fraction of a second later, also by programs that are already running. An index
    whose model is no longer on the disk stays as it is.
    """
    from rest_local.cli import terminal
    from rest_local.retrieval.update.updating import update
    from rest_local.retrieval.update.watching import Watcher

    terminal.show_warnings()
    stop = threading.Event()

    def report(commit: Commit) -> None:
        if as_json:
            print_json(commit.to_dict())
            sys.stdout.flush()
        else:
            say(line_of(commit))

    with ExitStack() as stack:
        targets = [target for name in names for target in targets_of(name, stack)]
        if not targets:
            raise DatastoreError("nothing to watch: no model of these datastores is on the disk any more")
        watcher = Watcher(targets, update, report, poll_s=poll_s)
        roots = dict.fromkeys(str(root.path) for one in watcher.indexes for root in one.roots)
        end_at_sigterm(stop)
        say(f"watching {', '.join(roots)}; Ctrl-C ends")
        try:
            watcher.run(stop)
        except KeyboardInterrupt:  # watchfiles raises it for any signal.
            if not stop.is_set():
                raise
            return
    raise DatastoreError("the watched datastores were removed")


def end_at_sigterm(stop: threading.Event) -> None:
    """Let SIGTERM end this process at once with exit code 0. An unfinished write is undone."""

    def end(number: int, frame: FrameType | None) -> None:
        stop.set()
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, end)


def targets_of(name: str, stack: ExitStack) -> Iterator[Target]:
    """Yield the indexes of a datastore that can be updated, because their model is on the disk with the same
    vocabulary.

    Warn about the others. Raises DatastoreNotFound, and DatastoreError if it was not built from files.
    """
    from rest_local.retrieval.format import Manifest
    from rest_local.retrieval.home import manifests
    from rest_local.retrieval.update.watching import Target, walks_of

    path = group.path_of(name)
    found = manifests(path)
    if not found:
        raise DatastoreNotFound(path)
    for manifest in found.values():
        if not isinstance(manifest, Manifest):
            warn(f"{manifest}; it is not watched")
        elif not walks_of(manifest.recipe):
            raise DatastoreError(f"datastore {name}: it was not built from files that can be watched")
        else:
            try:
                _, vocabulary = stack.enter_context(group.vocabulary_of(manifest))
            except RestLocalError as error:
                about = manifest.vocabulary.name or manifest.vocabulary.hash[:12]
                warn(f"datastore {name}: the index for vocabulary {about} goes stale: {error}")
            else:
                yield Target(name, path, vocabulary)


def line_of(commit: Commit) -> str:
    """Return a text such as "mycode: 1 changed, 2 added; 1,234,567 tokens of 812 files, in 0.08 s"."""
    fields = commit.to_dict()
    done = ", ".join(f"{fields[what]:,} {what}" for what in ("changed", "added", "deleted") if fields[what])
    held = f"{fields['total']:,} tokens of {counted(fields['documents'], 'file')}"
    return f"{commit.target.name}: {done}; {held}, in {commit.seconds:.2f} s"


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

    end_at_sigterm(stop)
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
