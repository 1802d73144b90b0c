"""The process of one model: the server of `rest_local.server` on a port of the loopback that only its parent can use.

Protocol: the parent writes a `Setup` to stdin (its length in 8 bytes, little-endian, and the pickle), then lines of
JSON, `{"do": "stop"}` or `{"do": "reload"}`. The process writes lines of JSON to stdout:

    {"event": "listening", "port": 40123}
    {"event": "loaded", "meta": {...}}                  what GET /v1/models says of the model
    {"event": "failed", "message": "...", "exit_code": 1}

It ends when it is told to, when stdin ends (the parent is gone) and after `failed`. Whatever else writes to stdout in
this process reaches stderr.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from rest_local.errors import RestLocalError
from rest_local.server.settings import Settings

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine
    from rest_local.decoding.service import Service
    from rest_local.server.state import State


@dataclass(frozen=True)
class Setup:
    """What a process serves; it is pickled.

    name      of the model
    load      loads the engine
    start     makes the service of the engine and `queue`; None: as in `Serving`
    secret    that every request has to bring
    folder    private to this server (`State.folder`)
    """

    settings: Settings
    name: str
    load: Callable[[], Engine]
    queue: int
    drain_seconds: int
    secret: bytes
    folder: Path | None = None
    start: Callable[[Engine, int], Service] | None = None


class Told:
    """The lines to the parent. Any thread."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._lock = file, threading.Lock()

    def __call__(self, event: str, **fields: Any) -> None:
        """Write one line. A parent that is gone reads nothing, which `_obey` notices."""
        line = json.dumps({"event": event, **fields}).encode() + b"\n"
        try:
            with self._lock:
                self._file.write(line)
                self._file.flush()
        except BrokenPipeError:
            return


def main() -> int:
    """Serve what stdin says, until it ends. The exit code."""
    tell = Told(_own_stdout())
    # Without a buffer, whose lock a thread that waits for a line would still hold when the interpreter ends.
    commands = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115
    setup: Setup = pickle.loads(_exactly(commands, int.from_bytes(_exactly(commands, 8), "little")))
    return serve(setup, commands, tell)


def packed(setup: Setup) -> bytes:
    """What the parent writes to stdin first."""
    data = pickle.dumps(setup)
    return len(data).to_bytes(8, "little") + data


def _exactly(file: RawIOBase, n: int) -> bytes:
    """The next `n` bytes. Raises EOFError."""
    data = b""
    while len(data) < n:
        if not (part := file.read(n - len(data))):
            raise EOFError
        data += part
    return data


def serve(setup: Setup, commands: RawIOBase, tell: Told) -> int:
    """Serve `setup` and obey `commands`. The exit code."""
    from rest_local.api.models import meta
    from rest_local.server.http import listen, log_to_stderr
    from rest_local.server.run import Serving

    def loaded(state: State) -> None:
        assert state.engine is not None
        tell("loaded", meta=meta(state.engine))

    log_to_stderr()
    try:
        with listen(replace(setup.settings, host="127.0.0.1", port=0)) as listening:
            serving = Serving(
                setup.settings,
                setup.name,
                setup.load,
                queue=setup.queue,
                drain_seconds=setup.drain_seconds,
                start=setup.start,
                secret=setup.secret,
                folder=setup.folder,
                told=loaded,
            )
            threading.Thread(target=_obey, args=(commands, serving), name="rest-local-commands", daemon=True).start()
            tell("listening", port=listening.getsockname()[1])
            serving.run(listening)
    except RestLocalError as error:
        tell("failed", message=str(error), exit_code=error.exit_code)
        return error.exit_code
    return 0


def _obey(commands: RawIOBase, serving: Any) -> None:
    """Carry out the parent's commands until it closes the pipe, or is gone. A command is read at once, though another
    is being carried out."""
    try:
        for line in commands:
            if json.loads(line)["do"] == "reload":
                threading.Thread(target=serving.reload, name="rest-local-reload", daemon=True).start()
            else:
                serving.stop()
    finally:
        serving.stop()


def _own_stdout() -> BinaryIO:
    """Stdout for this module alone: what C libraries and warnings write there goes to stderr from now on."""
    own = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(own, "wb")


if __name__ == "__main__":
    sys.exit(main())
