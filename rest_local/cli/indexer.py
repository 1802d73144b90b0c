"""Keeps datastores up to date while a command decodes, in a child process of the lowest priority.

Contract: `Indexer` starts `rest_local.cli.index.worker`, and `close` ends it; it also ends by itself with this process,
because its stdin does. Each commit is told to `committed`, so that the engine looks at once. Whatever goes wrong with
the child costs drafts only.

Lines for the user come at any time, also while an answer is shown or a message typed. They wait until `show_news`,
unless `at_once` was called.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rest_local.cli.messages import counted, say, warn

if TYPE_CHECKING:
    from rest_local.cli.checkout import Code

END_S = 2.0  # for the child to end by itself
_LAST_LINES = 3

_news: deque[Callable[[], None]] = deque()
_shows_at_once = False


def at_once() -> None:
    """Show lines when they come: nothing else is on the terminal."""
    global _shows_at_once
    _shows_at_once = True
    show_news()


def show_news() -> None:
    """Show the lines that wait. Call it where a line disturbs nothing."""
    with contextlib.suppress(IndexError):
        while True:
            _news.popleft()()


def _tell(show: Callable[[str], None], text: str) -> None:
    _news.append(lambda: show(text))
    if _shows_at_once:
        show_news()


class Indexer:
    """One child. model: the file whose vocabulary counts; names: datastores to keep up to date; code: what is built
    first where it is missing.
    """

    def __init__(self, model: Path, names: Sequence[str] = (), code: Code | None = None) -> None:
        import subprocess

        self.committed: Callable[[], None] = lambda: None
        self._closing = False
        self._ready: str | None = None
        self._tells_ready = False
        self._lock = threading.Lock()
        request = {"model": str(model), "names": list(names), "code": [[code.name, str(code.root)]] if code else []}
        self._child = subprocess.Popen(
            [sys.executable, "-m", "rest_local.cli.index.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=sys.platform != "win32",  # Ctrl-C at the terminal does not reach it
        )
        with contextlib.suppress(BrokenPipeError):  # it ended at once, which `_read` tells
            assert self._child.stdin is not None
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            self._child.stdin.flush()
        self._thread = threading.Thread(target=self._read, name="rest-local-indexer", daemon=True)
        self._thread.start()

    def tell_ready(self) -> None:
        """Tell the user when the code is there to draft from, at once if it is."""
        self._tells_ready = True
        self._show_ready()

    def close(self) -> None:
        """End the child; a second call does nothing. Datastores survive its end at any moment."""
        from subprocess import TimeoutExpired

        self._closing = True
        if self._child.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._child.stdin.close()
        try:
            self._child.wait(END_S)
        except TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._thread.join()

    def _read(self) -> None:
        last: deque[str] = deque(maxlen=_LAST_LINES)
        for event in self._events(last):
            kind = event["event"]
            if kind in ("warning", "failed"):
                _tell(warn, str(event.get("message")))
            elif kind == "ready":
                self._ready = f"ready: {held(event['tokens'], event['documents'])}"
                self._show_ready()
            if kind in ("ready", "commit"):
                self.committed()
        code = self._child.wait()
        if code and not self._closing:
            why = " / ".join(last) or f"exit code {code}"
            _tell(warn, f"datastores are not kept up to date any more: the indexing process ended: {why}")

    def _show_ready(self) -> None:
        with self._lock:  # called in two threads
            text, self._ready = (self._ready, None) if self._tells_ready else (None, self._ready)
        if text is not None:
            _tell(say, text)

    def _events(self, last: deque[str]) -> Iterator[dict[str, Any]]:
        """What the child tells. Other lines are its last words where it fails, and go to `last`."""
        assert self._child.stdout is not None
        with self._child.stdout as lines:
            for line in lines:
                try:
                    event = json.loads(line)
                except ValueError:
                    event = None
                if isinstance(event, dict) and "event" in event:
                    yield event
                elif text := line.decode("utf-8", "replace").strip():
                    last.append(text)


def held(tokens: int, documents: int) -> str:
    """Such as "1.2 M tokens of 812 files"."""
    count = f"{tokens / 1e6:.1f} M" if tokens >= 1_000_000 else f"{tokens:,}"
    return f"{count} tokens of {counted(documents, 'file')}"
