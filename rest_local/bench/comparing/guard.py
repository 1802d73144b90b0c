"""Runs a program and ends it when the parent ends, whatever ended the parent. A script without imports of this package.

    python guard.py PROGRAM [ARGUMENT]...

The parent holds the other end of standard input. Its end, which every system closes with the process, ends the program:
SIGTERM first, SIGKILL after GRACE_SECONDS, for the program's whole process group. A child that left the group is not
found. On Windows only the program itself is ended, at once.

Standard output has a JSON object on each line: `{"pid": 5}` or `{"error": "no such file"}`, then `{"code": -11}`, which
is minus the signal if one ended it. The program has no input, and writes its output and errors to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

GRACE_SECONDS = 2.0


def main(command: list[str]) -> None:
    """Run the program until it ends or the parent does."""
    try:
        program = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=sys.platform != "win32"
        )
    except (OSError, ValueError) as error:
        _tell({"error": str(error)})
        return
    _tell({"pid": program.pid})
    threading.Thread(target=_end_with_parent, args=(program,), daemon=True).start()
    code = program.wait()
    _kill_group(program.pid)  # what it left
    _tell({"code": code})


def _end_with_parent(program: subprocess.Popen[bytes]) -> None:
    sys.stdin.buffer.read()
    program.terminate()
    until = time.monotonic() + GRACE_SECONDS
    while program.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    if program.poll() is None:
        _kill_group(program.pid)
        program.kill()


def _kill_group(group: int) -> None:
    if sys.platform != "win32":
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
            os.killpg(group, signal.SIGKILL)


def _tell(value: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # the parent has ended
        print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # the thread may still read
