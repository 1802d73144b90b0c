"""`index watch`: keep datastores up to date with the files they were built from."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from types import FrameType
from typing import TYPE_CHECKING

import click

from rest_local.cli import completion
from rest_local.cli.index import group
from rest_local.cli.index.group import index
from rest_local.cli.sections import option
from rest_local.cli.terminal import counted, json_option, print_json, say, warn
from rest_local.errors import DatastoreError, DatastoreNotFound, RestLocalError

if TYPE_CHECKING:
    from rest_local.retrieval.update.watching import Commit, Target


@index.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=completion.datastores)
@option(
    "--poll SECONDS",
    "Look at all files so often, where the system tells of no changes: on network drives.",
    to="poll_s",
    type=click.FloatRange(min=0.1),
    configurable=False,
)
@json_option
def watch(names: tuple[str, ...], poll_s: float | None, as_json: bool) -> None:
    """Keep datastores up to date with the files they were built from, until Ctrl-C.

    A saved file can be drafted from a fraction of a second later, by programs that run as well. An index whose model
    is no longer on the disk stays as it is.
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
        except KeyboardInterrupt:  # watchfiles raises it for any signal
            if not stop.is_set():
                raise
            return
    raise DatastoreError("the watched datastores were removed")


def end_at_sigterm(stop: threading.Event) -> None:
    """Let SIGTERM end this process with exit code 0 at once. What is being written is undone."""

    def end(number: int, frame: FrameType | None) -> None:
        stop.set()
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, end)


def targets_of(name: str, stack: ExitStack) -> Iterator[Target]:
    """The indexes of a datastore that can be updated: their model is on the disk and has the same vocabulary. For the
    others a warning. Raises DatastoreNotFound, and DatastoreError for one that was not built from files.
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
            warn(f"{manifest}; not watched")
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
    """Such as "mycode: 1 changed, 2 added; 1,234,567 tokens of 812 files, in 0.08 s"."""
    fields = commit.to_dict()
    done = ", ".join(f"{fields[what]:,} {what}" for what in ("changed", "added", "deleted") if fields[what])
    held = f"{fields['total']:,} tokens of {counted(fields['documents'], 'file')}"
    return f"{commit.target.name}: {done}; {held}, in {commit.seconds:.2f} s"
