"""Programs that a benchmark measures: start one that serves HTTP on a free port, post JSON to it, end it.

Whatever goes wrong is ServerFailed with the last lines that the program wrote: it ends, hangs, or answers something
else. A server that waits for its turn can be paused. `Binary` is a llama-server and what it can do.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
SHOWN = 500  # An error shows so many characters of a program's output.
POLL_SECONDS, HEALTH_SECONDS, END_SECONDS = 0.02, 5.0, 10.0


class ServerFailed(Exception):
    """The program does not do what it should."""


class Server:
    """A running server. `command` has neither --host nor --port. Use `with`. Raises ServerFailed if it cannot start.

    `home` takes the place of the user's home, so that no configuration or cache of the user is read or written.
    """

    def __init__(self, command: Sequence[str], home: Path | None = None) -> None:
        with socket.socket() as free:
            free.bind((HOST, 0))
            self.port: int = free.getsockname()[1]
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._closed = ""
        try:
            self._process = subprocess.Popen(
                [*command, "--host", HOST, "--port", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env=environment(home),
            )
        except OSError as error:
            self._output.close()
            raise ServerFailed(f"{command[0]}: {error.strerror}") from error

    @property
    def output(self) -> str:
        """Return what it wrote, which is complete after `close`."""
        if self._output.closed:
            return self._closed
        return os.pread(self._output.fileno(), os.fstat(self._output.fileno()).st_size, 0).decode("utf-8", "replace")

    def start(self, seconds: float) -> None:
        """Wait until GET /health answers 200. Raises ServerFailed after `seconds`."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise self._failed(f"ends with {self._process.returncode} at its start")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._request("GET", "/health", None, HEALTH_SECONDS)[0] == 200:
                    return
            time.sleep(POLL_SECONDS)
        raise self._failed(f"is not ready after {seconds:g} s")

    def post(self, path: str, body: Mapping[str, Any], seconds: float) -> tuple[dict[str, Any], float]:
        """Return the JSON object of the answer, and the seconds from the request to its last byte.

        Raises ServerFailed, also if a part of the answer takes longer than `seconds`.
        """
        begun = time.perf_counter()
        try:
            status, content = self._request("POST", path, json.dumps(body).encode(), seconds)
        except (OSError, http.client.HTTPException) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.5)  # It may be ending, and still write why.
            raise self._failed(f"gives no answer ({type(error).__name__}: {error})") from error
        taken = time.perf_counter() - begun
        try:
            answer = json.loads(content)
        except ValueError:
            answer = None
        if status != 200 or not isinstance(answer, dict):
            raise self._failed(f"answers {status}: {content[:SHOWN].decode('utf-8', 'replace')}")
        return answer, taken

    def stream(self, path: str, body: Mapping[str, Any], seconds: float) -> Iterator[tuple[float, dict[str, Any]]]:
        """Yield the events of a streamed answer, each with the seconds since the request. Raises ServerFailed, also if
        the next event takes longer than `seconds`.
        """
        begun = time.perf_counter()
        try:
            with contextlib.closing(http.client.HTTPConnection(HOST, self.port, timeout=seconds)) as connection:
                content = json.dumps({**body, "stream": True}).encode()
                connection.request("POST", path, content, {"Content-Type": "application/json"})
                response = connection.getresponse()
                if response.status != 200:
                    said = response.read()[:SHOWN].decode("utf-8", "replace")
                    raise self._failed(f"answers {response.status}: {said}")
                for line in response:
                    if line.startswith(b"data: {"):
                        yield time.perf_counter() - begun, json.loads(line.removeprefix(b"data: "))
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._failed(f"gives no answer ({type(error).__name__}: {error})") from error

    def pause(self) -> None:
        """Stop all its processes until `resume` or `close`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let its processes go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        """Signal the process and all that it started. The process of a model has a session of its own, so the process
        group is not enough.
        """
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        children: dict[int, list[int]] = {}
        for line in listed.splitlines():
            pid, parent = map(int, line.split())
            children.setdefault(parent, []).append(pid)
        family = [self._process.pid]
        for pid in family:
            family += children.get(pid, [])
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        """End it and wait for that. A second call does nothing."""
        if self._output.closed:
            return
        self.resume()
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._closed = self.output
        self._output.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, method: str, path: str, body: bytes | None, seconds: float) -> tuple[int, bytes]:
        with contextlib.closing(http.client.HTTPConnection(HOST, self.port, timeout=seconds)) as connection:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()

    def _failed(self, cause: str) -> ServerFailed:
        return ServerFailed(f"{cause}\n{self.output[-SHOWN:].strip()}".strip())


@dataclass(frozen=True)
class Binary:
    """A llama-server. `kinds` are its speculative types, or none if it is too old for --spec-type.

    `options` are those that it still takes, each with its default, or "" if the help names none.
    """

    path: str
    version: str
    kinds: tuple[str, ...]
    options: Mapping[str, str]

    @classmethod
    def of(cls, name: str | os.PathLike[str]) -> Binary:
        """Ask it for its version and its help. `name`: a path, or found in PATH. Raises ServerFailed."""
        path = shutil.which(name)
        if path is None:
            raise ServerFailed(f"{os.fspath(name)}: no such program")
        version = re.search(r"^version: *(\S.*)", _said(path, "--version"), re.MULTILINE)
        described = _said(path, "--help")
        blocks = [
            re.match(r"((?:--?[a-z][\w-]*,? *)+)(.*)", text, re.DOTALL) for text in re.split(r"\n(?=-)", described)
        ]
        options = {
            option: next(iter(re.findall(r"\(default: (\S+)\)", found[2])), "")
            for found in blocks
            if found and "argument has been removed" not in found[2]
            for option in re.findall(r"(?<![\w-])--?[a-z][\w-]*", found[1])
        }
        if version is None or not {"--model", "--port", "--ctx-size"} <= set(options):
            raise ServerFailed(f"{path}: not a llama-server, by what it writes for --version and --help")
        kinds = re.search(r"--spec-type\s+([\[\]|a-z0-9,\s-]*?)(?=\s{2,}[a-z]|\s--|\n\s*\n|$)", described)
        found = re.findall(r"[a-z0-9]+(?:-[a-z0-9]+)*", kinds[1]) if kinds else []
        return cls(path, version[1].strip()[:100], tuple(dict.fromkeys(found)), options)


def _said(path: str, argument: str) -> str:
    try:
        done = subprocess.run([path, argument], capture_output=True, env=environment(), timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerFailed(f"{path} {argument}: {error}") from error
    return (done.stdout + done.stderr).decode("utf-8", "replace")


def environment(home: Path | None = None) -> dict[str, str]:
    """Return the environment without options for llama-server, with `home` as for a user who set nothing."""
    foreign = ("LLAMA_ARG_", "LLAMA_API_KEY", *(("REST_LOCAL_", "XDG_") if home else ()))
    found = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return found | ({"HOME": str(home)} if home else {})
