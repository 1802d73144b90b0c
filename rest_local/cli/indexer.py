"""`--code`, `--no-code` and `--watch`: keep datastores up to date while a command decodes.

The datastore of a checkout is named after its root, so all commands below that root share it. At a terminal the user is
asked once whether to draft from it. The answer is kept in the data directory, by root, and so is what was said about
datastores (`cli.opening`).

`Indexer` starts a child process of the lowest priority (`cli.indexer_process`), and `close` ends it. It also ends by
itself with this process, because its stdin does. `committed` is called after each commit, so that the engine looks at
once. Whatever goes wrong with the child costs only drafts. Its lines for the user may come while an answer is shown or
a message is typed, so they wait until `show_news`, unless `at_once` was called.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from rest_local.cli import completion, terminal
from rest_local.cli.sections import in_section
from rest_local.cli.terminal import counted, say, warn
from rest_local.errors import InputInvalid, printable

NAME_LENGTH = 40


@dataclass(frozen=True)
class Code:
    """A folder to draft from: the root of a checkout, or a path outside of any."""

    root: Path

    @property
    def name(self) -> str:
        """Return the name of its datastore, which is legible and differs for every root."""
        import hashlib

        legible = re.sub(r"[^A-Za-z0-9._-]+", "-", self.root.name).strip("-.")[:NAME_LENGTH] or "code"
        digest = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:8]
        return f"{legible}-{digest}"


def code_of(path: Path) -> Code:
    """Return the checkout that holds `path`, or else the path alone. Raises InputInvalid if there is no such path."""
    path = path.expanduser()
    if not path.exists():
        raise InputInvalid("--code", printable(str(path)), "no such file or directory")
    path = path.resolve()
    return Code(root_of(path) or path)


def root_of(path: Path) -> Path | None:
    """Return the root of the git checkout (or work tree, or submodule) that holds an absolute path. Runs nothing."""
    return next((folder for folder in (path, *path.parents) if (folder / ".git").exists()), None)


def offered() -> Code | None:
    """Return the checkout of the working directory if the user wants it. A terminal asks the first time."""
    if not terminal.can_ask():
        return None
    try:
        root = root_of(Path.cwd().resolve())
    except OSError:  # The directory is gone or cannot be read.
        return None
    if root is None or root == Path.home().resolve():  # A home directory under git is no project.
        return None
    answer = recalled(str(root))
    if answer is None:
        answer = terminal.ask(
            f"Draft from the code of this checkout ({root})? It is indexed in the background, without secrets and "
            "ignored files, and stays on this machine. This is asked once",
            default=True,
        )
        remember(str(root), answer)
    return Code(root) if answer else None


def recalled(key: str) -> bool | None:
    """Return the kept answer to a question, or None if there is none."""
    answer = _answers().get(key)
    return answer if isinstance(answer, bool) else None


def remember(key: str, answer: bool) -> None:
    """Keep an answer. If that fails, the question comes again."""
    from rest_local.paths import write_atomically

    try:
        write_atomically(_path(), (json.dumps({**_answers(), key: answer}, indent=1) + "\n").encode("ascii"))
    except OSError as error:
        warn(f"the answer is not kept: {error.filename}: {error.strerror}")


def _answers() -> dict[str, object]:
    with contextlib.suppress(OSError, ValueError):  # A damaged file is as good as none: the question comes again.
        found = json.loads(_path().read_bytes())
        return found if isinstance(found, dict) else {}
    return {}


def _path() -> Path:
    """Return the file of answers. Raises OSError if the data directory cannot be made."""
    from rest_local.paths import data_dir

    return data_dir() / "answers.json"


_engine = in_section("Engine")


@dataclass(frozen=True)
class Live:
    """The datastores to keep up to date: of a checkout, with `watch` those of -d. `offers` may ask about a checkout."""

    code: Code | None = None
    watch: bool = False
    offers: bool = False

    def chosen(self) -> Live:
        """Add the checkout of the working directory, if none was named and the user wants it. May ask."""
        if self.code is not None or not self.offers:
            return self
        return replace(self, code=offered(), offers=False)


ASLEEP = Live()


def code_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --code and --no-code, which become the argument `live`, with `watch` if the command has it."""

    @functools.wraps(command)
    def gathered(*, code: Path | None, no_code: bool, watch: bool = False, **values: Any) -> Any:
        found = None if code is None else code_of(code)
        return command(live=Live(found, watch, offers=not no_code), **values)

    with_code = _engine(
        "--code PATH",
        "Draft from this folder or the git checkout around it. It is indexed in the background and kept up to date.",
        type=click.Path(path_type=Path),
        shell_complete=completion.paths,
        configurable=False,
    )
    without = _engine("--no-code", "Do not draft from the checkout, and do not ask.", rare=True)
    return with_code(without(gathered))


END_S = 2.0  # The child has so many seconds to end by itself.
_LAST_LINES = 3

_news: deque[Callable[[], None]] = deque()
_shows_at_once = False


def at_once() -> None:
    """Show lines as they come, because nothing else is on the terminal."""
    global _shows_at_once
    _shows_at_once = True
    show_news()


def show_news() -> None:
    """Show the lines that wait. Call it when a line disturbs nothing."""
    with contextlib.suppress(IndexError):
        while True:
            _news.popleft()()


def _tell(show: Callable[[str], None], text: str) -> None:
    _news.append(lambda: show(text))
    if _shows_at_once:
        show_news()


class Indexer:
    """The child process that keeps `names` up to date for one model, and builds the datastore of `code` if needed."""

    def __init__(self, model: Path, names: Sequence[str] = (), code: Code | None = None) -> None:
        import subprocess

        self.committed: Callable[[], None] = lambda: None
        self._closing = False
        self._ready: str | None = None
        self._tells_ready = False
        self._lock = threading.Lock()
        request = {"model": str(model), "names": list(names), "code": [[code.name, str(code.root)]] if code else []}
        self._child = subprocess.Popen(
            [sys.executable, "-c", "from rest_local.cli.indexer_process import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C at the terminal must not reach it.
        )
        with contextlib.suppress(BrokenPipeError):  # If it ended at once, `_read` tells the user.
            assert self._child.stdin is not None
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            self._child.stdin.flush()
        self._thread = threading.Thread(target=self._read, name="rest-local-indexer", daemon=True)
        self._thread.start()

    def tell_ready(self) -> None:
        """Tell the user when the code can be drafted from, at once if it already can."""
        self._tells_ready = True
        self._show_ready()

    def close(self) -> None:
        """End the child. A second call does nothing. Datastores survive its end at any moment."""
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
        assert self._child.stdout is not None
        with self._child.stdout as lines:
            for line in lines:
                try:
                    event = json.loads(line)
                    kind = event["event"]
                except (ValueError, TypeError, KeyError):
                    last.append(line.decode("utf-8", "replace").strip())
                    continue
                if kind in ("warning", "failed"):
                    _tell(warn, str(event.get("message")))
                elif kind == "ready":
                    self._ready = f"ready: {held(event['tokens'], event['documents'])}"
                    self._show_ready()
                if kind in ("ready", "commit"):
                    self.committed()
        code = self._child.wait()
        if code and not self._closing:
            why = " / ".join(filter(None, last)) or f"exit code {code}"
            _tell(warn, f"datastores are not kept up to date any more: the indexing process ended: {why}")

    def _show_ready(self) -> None:
        with self._lock:  # Two threads call this.
            text, self._ready = (self._ready, None) if self._tells_ready else (None, self._ready)
        if text is not None:
            _tell(say, text)


def held(tokens: int, documents: int) -> str:
    """Return a text such as "1.2 M tokens of 812 files"."""
    count = f"{tokens / 1e6:.1f} M" if tokens >= 1_000_000 else f"{tokens:,}"
    return f"{count} tokens of {counted(documents, 'file')}"
