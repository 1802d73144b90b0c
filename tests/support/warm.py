"""Commands in processes that are forked from one that has imported the package: half of what a short one costs.

    with Warm(folder) as warm:
        run([warm.program("rest-local"), "doctor"])
        run([warm.program("python"), "-c", "import rest_local"])

Each has its own arguments, folder, environment and streams, and ends as a fresh process does. SIGTERM and SIGINT reach
it; other signals are for the process id that `started` returns.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import pkgutil
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

CLIENT = """
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    socket.send_fds(connection, [b"."], [0, 1, 2])
    connection.sendall(json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)]).encode())
    connection.shutdown(socket.SHUT_WR)
    child = int(connection.recv(8), 16)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(child, number))
    code = int(connection.recv(8))
    sys.exit(code if code >= 0 else 128 - code)
"""


class Warm:
    """A context manager. `bin`: the folder of the programs `rest-local` and `python`."""

    def __init__(self, folder: Path) -> None:
        self.bin, self._address = folder / "bin", folder / "socket"

    def __enter__(self) -> Warm:
        self.bin.mkdir(parents=True)
        client = self.bin.with_name("client.py")
        client.write_text(CLIENT)
        for name in ("rest-local", "python"):
            program = self.program(name)
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{client}" "{self._address}" {name} "$@"\n')
            program.chmod(0o755)
        pipe, root = subprocess.PIPE, Path(__file__).parents[2]
        command = [sys.executable, __file__, str(self._address)]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=root)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def program(self, name: str) -> Path:
        return self.bin / name

    def started(self, code: str, streams: Sequence[int]) -> tuple[int, socket.socket]:
        """Run `python -c code` here with these streams. Return its process id, and where its exit code comes."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(self._address))
        socket.send_fds(connection, [b"."], streams)
        connection.sendall(json.dumps([["python", "-c", code], os.getcwd(), dict(os.environ)]).encode())
        connection.shutdown(socket.SHUT_WR)
        return int(connection.recv(8), 16), connection


def _serve(address: str) -> None:
    """Start the process of each command, in which alone this returns."""
    import rest_local

    for module in pkgutil.walk_packages(rest_local.__path__, "rest_local."):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError):  # It may belong to an extra.
                import_module(module.name)
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        os.write(1, b"ready\n")
        while True:
            connection, _ = listening.accept()
            if os.fork():
                connection.close()
                with contextlib.suppress(ChildProcessError):
                    while os.waitpid(-1, os.WNOHANG)[0]:
                        pass
                continue
            listening.close()
            _, streams, _, _ = socket.recv_fds(connection, 1, 3)
            with connection.makefile("rb") as sent:
                command = sent.read()
            if child := os.fork():
                connection.sendall(b"%08x" % child)
                for stream in streams:
                    os.close(stream)
                connection.sendall(b"%d" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
                os._exit(0)
            connection.close()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            arguments, folder, environment = json.loads(command)
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            sys.argv = arguments
            return


def _run() -> int:
    from rest_local.cli.main import main

    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", 1)  # noqa: SIM115
    try:
        if sys.argv[0] == "python":
            exec(compile(sys.argv[2], "<string>", "exec"), {"__name__": "__main__"})
        else:
            main()
        return 0
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else bool(ended.code)
    except BaseException:
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    _serve(sys.argv[1])
    code = _run()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)  # freeing all modules takes half a second
