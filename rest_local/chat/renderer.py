"""Renders the chat template of a model: messages in, prompt text out, as Hugging Face's `apply_chat_template` does.

Templates come with model files, which are not trusted. They are rendered in a sandbox and in a child process: a
template that loops or allocates without end costs only the child.

Contract:

- There is one child for this process. The first call starts it (0.1 s), the next calls use it, one at a time.
- The child has `MEMORY` bytes of address space, and `SECONDS` of processor time for a template. A child that exceeds
  them ends, and the next call starts another. macOS ignores the limit of address space: only time and text size are
  bounded there. On Windows, which has no timer for it, `SECONDS` are of the clock.
- Requests to the child are pickles, because this process writes them. Answers are JSON, because a template may have
  taken over the child.

A chat of 20 messages takes 0.28 ms; in this process it took 0.06 ms.

The sandbox is Jinja's immutable one, with what chat templates expect. A template reaches no Python internals and
changes none of its arguments. The rules are those of transformers' `utils/chat_template_utils.py`: trim_blocks,
lstrip_blocks, loop controls, `generation`, raise_exception, tojson.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rest_local import stop
from rest_local.errors import TemplateFailed, TemplateTooCostly
from rest_local.processor_time import WAIT, bounded, was_exceeded

MAX_REPEAT = 1 << 20  # length of a repeated text or list; no chat template needs a longer one


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's tokens for training; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012 - the attribute is Jinja's

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Also refuses `'x' * 10**9` and the like, which would exhaust memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for value, times in ((left, right), (right, left)):
            too_long = (
                isinstance(value, (str, list, tuple)) and isinstance(times, int) and len(value) * times > MAX_REPEAT
            )
            if too_long or (operator == "**" and isinstance(times, (int, float)) and abs(times) > 64):
                raise jinja2.TemplateRuntimeError(f"{operator} gives too large a result")
        return super().call_binop(context, operator, left, right)


def render_here(template: str, names: Mapping[str, Any]) -> str:
    """Renders in this process. Raises TemplateFailed, and TypeError for a value that the template misuses."""
    try:
        return _compiled(template).render(names)
    except jinja2.TemplateError as error:
        raise TemplateFailed(error.message or type(error).__name__) from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, ValueError) as error:
        raise TemplateFailed(f"{type(error).__name__}: {error}") from error


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension])
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise, strftime_now=_strftime_now)
    return environment.from_string(template)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


SECONDS = 5.0
"""For one template, of processor time: a child that waits for a processor of a busy machine has done nothing wrong. The
largest conversation that the server accepts (8 MB) renders in well under one second."""

WAIT_SECONDS = WAIT * SECONDS
"""By the clock, with the start of the child. It bounds a template that has taken over the child, too."""

MEMORY = 1 << 30
MAX_TEXT = 1 << 26
"""Characters of a rendered prompt."""

_LENGTH = struct.Struct("<Q")
_SECONDS = struct.Struct("<d")  # in front of a request
_POLL_SECONDS = 0.05  # between two checks whether the thread was stopped


class Renderer:
    """A child process and the lock that gives access to it. Thread-safe."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._output: _Output | None = None
        self._owner = 0  # the process that started the child; a process forked from it starts its own

    def render(self, template: str, names: Mapping[str, Any]) -> str:
        """The text. Raises TemplateFailed, a TypeError of the template, ServiceClosed if the thread is stopped."""
        request = pickle.dumps((template, dict(names)))
        while not self._turn.acquire(timeout=_POLL_SECONDS):
            stop.check()
        try:
            answer = json.loads(self._ask(request))
        except BaseException:
            self._kill()
            raise
        finally:
            self._turn.release()
        if "text" in answer:
            return str(answer["text"])
        kind, cause = answer.get("kind"), str(answer.get("cause"))
        if kind == "TypeError":
            raise TypeError(cause)
        raise TemplateTooCostly(cause) if kind == "limit" else TemplateFailed(cause)

    def close(self) -> None:
        """Ends the child. The next call starts another."""
        with self._turn:
            self._kill()

    def _ask(self, request: bytes) -> bytes:
        until = time.monotonic() + WAIT_SECONDS
        child = self._running()
        assert child.stdin is not None
        assert self._output is not None
        try:
            child.stdin.write(_LENGTH.pack(len(request)) + _SECONDS.pack(SECONDS) + request)
            child.stdin.flush()
            (length,) = _LENGTH.unpack(self._output.read(_LENGTH.size, until))
            if length > 8 * MAX_TEXT:
                raise TemplateTooCostly(f"its text has more than {MAX_TEXT} characters")
            return self._output.read(length, until)
        except TimeoutError:
            raise TemplateTooCostly(f"it takes longer than {WAIT_SECONDS:.0f} s") from None
        except (BrokenPipeError, EOFError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(1.0)
            if was_exceeded(child.returncode):
                raise TemplateTooCostly(f"it takes longer than {SECONDS:.0f} s") from None
            raise TemplateTooCostly(f"it ended the process that renders it (memory: {MEMORY >> 20} MB)") from None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._owner != os.getpid():
            self._child = None
        if self._child is None or self._child.poll() is not None:
            self._kill()
            command = [sys.executable, "-m", "rest_local.chat.renderer"]
            root = Path(__file__).parents[2]  # -m looks in the working directory first
            pipe = subprocess.PIPE
            try:
                self._child = subprocess.Popen(command, cwd=root, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
            except OSError as error:
                raise TemplateFailed(f"no process can be started to render it: {error}") from error
            assert self._child.stdout is not None
            self._owner, self._output = os.getpid(), _Output(self._child.stdout)
        return self._child

    def _kill(self) -> None:
        child, self._child = self._child, None
        if child is None or self._owner != os.getpid():
            return
        child.kill()
        child.wait()
        if self._output is not None:
            self._output.thread.join()  # the child is dead, so its output has ended
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class _Output:
    """The output of a child, read by a thread of its own: Windows cannot wait for a pipe with a time limit."""

    def __init__(self, file: IO[bytes]) -> None:
        self._parts: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._unread = bytearray()
        self.thread = threading.Thread(target=self._pump, args=(file.fileno(),), name="chat-template", daemon=True)
        self.thread.start()

    def read(self, size: int, until: float) -> bytes:
        """Exactly `size` bytes. Raises TimeoutError at the time `until`, EOFError, ServiceClosed."""
        while len(self._unread) < size:
            stop.check()
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            with contextlib.suppress(queue.Empty):
                part = self._parts.get(timeout=min(left, _POLL_SECONDS))
                if not part:
                    raise EOFError
                self._unread += part
        found = bytes(self._unread[:size])
        del self._unread[:size]
        return found

    def _pump(self, descriptor: int) -> None:
        part = b"more"
        while part:
            part = os.read(descriptor, 1 << 20)
            self._parts.put(part)


_renderer = Renderer()
atexit.register(_renderer.close)


def render_limited(template: str, names: Mapping[str, Any]) -> str:
    """`rest_local.chat.renderer.render_here` in the child of this process."""
    return _renderer.render(template, names)


def _answer(request: bytes) -> dict[str, str]:
    from rest_local.chat.renderer import render_here

    template, names = pickle.loads(request)
    try:
        text = render_here(template, names)
    except MemoryError:
        return {"kind": "limit", "cause": f"it takes more than {MEMORY >> 20} MB of memory"}
    except TypeError as error:
        return {"kind": "TypeError", "cause": str(error)[:1000]}
    except TemplateFailed as error:
        return {"cause": error.cause[:1000]}
    except Exception as error:
        return {"cause": f"{type(error).__name__}: {error}"[:1000]}
    if len(text) > MAX_TEXT:
        return {"kind": "limit", "cause": f"its text has more than {MAX_TEXT} characters"}
    return {"text": text}


def main() -> None:
    """The child process: answers requests until its input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this process
    _bound()
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while head := source.read(_LENGTH.size):
        (seconds,) = _SECONDS.unpack(source.read(_SECONDS.size))
        request = source.read(*_LENGTH.unpack(head))
        with bounded(seconds):
            answer = json.dumps(_answer(request)).encode()
        sink.write(_LENGTH.pack(len(answer)) + answer)
        sink.flush()


def _bound() -> None:
    try:
        import resource
    except ImportError:  # Windows: only the time is limited
        return
    for limit, most in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(limit, (most, most))


if __name__ == "__main__":
    main()


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    bos: str | None,
    eos: str | None,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt for a conversation. Special tokens are spelled out: tokenize with special=True, add_special=False.

    messages    dicts with `role` and `content`, and what else the template reads
    bos, eos    the texts of the vocabulary's start and end tokens, None where it has none
    variables   further names for the template, such as enable_thinking

    As in llama-server, `enable_thinking` is True unless it is given, and `date_string` and `datetime` are today. Some
    templates take tools as `functions`, in JSON.

    Raises TemplateFailed where the template is not valid Jinja, refuses the messages or does what the sandbox forbids;
    TemplateTooCostly where it exceeds a limit of time or memory; ServiceClosed where the thread is stopped.
    """
    today = datetime.now()
    names: dict[str, Any] = {
        "enable_thinking": True,
        "date_string": today.strftime("%d %b %Y"),
        "datetime": today.strftime("%b %d %Y"),
        "functions": json.dumps(tools) if tools else "",
    }
    names |= {**(variables or {}), "messages": list(messages), "tools": tools, "documents": None}
    names |= {"bos_token": bos or "", "eos_token": eos or "", "add_generation_prompt": add_generation_prompt}
    try:
        return render_limited(template, names)
    except TypeError as error:
        if tools is not None:
            raise TemplateFailed(f"TypeError: {error}") from error
    try:  # some templates loop over `tools` without a check that there are any
        return render_limited(template, names | {"tools": []})
    except TypeError as error:
        raise TemplateFailed(f"TypeError: {error}") from error
