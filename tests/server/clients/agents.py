"""Agents as child processes, and a model that answers them by what they ask.

A test of an agent runs where an environment variable names its program, and is skipped elsewhere. The program gets a
home of its own and no other credentials; what would reach another machine is switched off by its own settings.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from live import Live

BUGGY = "def add(a, b):\n    return a - b\n"
FIXED = "def add(a, b):\n    return a + b\n"
Reply = Callable[[str], str]


@dataclass
class Replies:
    """Answers every request by `reply`, which gets the prompt. `prompts`: of all requests so far."""

    reply: Reply
    prompts: list[str] = field(default_factory=list)


@contextlib.contextmanager
def answering(live: Live, reply: Reply) -> Iterator[Replies]:
    """The scripted model answers in a thread, in pieces of 7 characters."""
    service, replies, ended = live.service, Replies(reply), threading.Event()
    service.answer = None
    vocabulary = service.engine.model.vocabulary

    def work() -> None:
        while True:
            with service._news:
                service._news.wait_for(lambda: ended.is_set() or len(service.streams) > len(replies.prompts))
                if ended.is_set():
                    return
                stream = service.streams[len(replies.prompts)]
            prompt = b"".join(vocabulary.piece(token) for token in stream.request.prompt).decode("utf-8", "replace")
            replies.prompts.append(prompt)
            said = replies.reply(prompt)
            for start in range(0, len(said), 7):
                stream.give(said[start : start + 7])
            stream.end("stop")

    thread = threading.Thread(target=work, name="replies")
    thread.start()
    try:
        yield replies
    finally:
        ended.set()
        with service._news:
            service._news.notify_all()
        thread.join(30)
        assert not thread.is_alive()


def program(variable: str) -> str:
    """The program that an environment variable names; skips the test without it."""
    path = os.environ.get(variable)
    if not path:
        pytest.skip(f"{variable} names no program; see the module's text")
    return path


def run(command: list[str], folder: Path, variables: Mapping[str, str], seconds: int = 240) -> str:
    """The output of a program in `folder`, with a home there. Fails with its output where it fails."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    environment = kept | {"HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config"), "TERM": "dumb"} | dict(variables)
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
