"""Compiles grammars in a child process first, because a hostile grammar can end the process that compiles it.

With llguidance 1.9.1, a chain of 2 000 rules that refer to each other exhausts a stack of 1 MiB (SIGSEGV), and a schema
with 200 patterns in `allOf` compiles for more than 30 s. The child has limits of time, memory and stack. A grammar that
passes is compiled again in this process, by the same code and with a larger stack.

One child serves all grammars, one at a time. It ends with this process. A child that dies is replaced.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rest_local.errors import GenerationError, GrammarsBusy, OptionError
from rest_local.processor_time import WAIT, bounded, was_exceeded

if TYPE_CHECKING:
    from llguidance import LLParserLimits

SECONDS = 5.0  # of processor time for one grammar; an enum of 50 000 integers takes 0.4 s
START_SECONDS = 60.0
WAIT_SECONDS = 10.0  # for grammars of other requests: a waiting request occupies a thread of the server
MEMORY_BYTES = 1 << 30
KILLED = 1 if os.name == "nt" else -9  # exit status of a child after `Popen.kill`
STACK_BYTES = 64 << 20  # of the thread that compiles in the child; `tokens` uses twice as much
SMALL_STACK_BYTES = 256 << 10  # half of what macOS gives a thread: masks are computed in any thread

_T = TypeVar("_T")
_ESCAPES = re.compile(r"\\(?:u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_PARTS = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|[\w-]+', re.DOTALL)
_TOKEN_NAMES = re.compile(r"<[^<>\s\"]{1,64}>")
_STOPS = dict.fromkeys(("NoExtension", "NoExtensionBias"), "it allows nothing") | dict.fromkeys(
    ("ParserTooComplex", "LexerTooComplex"), "it is too large"
)  # llguidance's names for why a parser ends, which are all that some of its messages contain
_TOKEN_NUMBERS = re.compile(r"<\[[\d,\s-]*\]>")


def limits() -> LLParserLimits:
    """Limits of the work for one mask, and of lexer states, which take 1 to 2 kB each.

    llguidance's defaults are 50 000, 200 000 and 250 000.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(step_max_items=20_000, step_lexer_fuel=100_000, max_lexer_states=50_000, verbose_errors=False)


@lru_cache(maxsize=64)
def compile_apart(text: str) -> None:
    """Check that a grammar compiles within the limits and allows a first token. Raises OptionError."""
    _child.ask({"compile": text})


@lru_cache(maxsize=64)
def convert(text: str) -> str:
    """GBNF as Lark. Raises OptionError."""
    return _child.ask({"convert": text})


class _Child:
    """The child process and the lock that gives access to it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, command: dict[str, str]) -> str:
        """The answer to a command, `{"compile": text}` or `{"convert": text}`.

        Raises OptionError for a grammar that fails, GrammarsBusy after WAIT_SECONDS, GenerationError if there is no
        child process.
        """
        if not self._lock.acquire(timeout=WAIT_SECONDS):
            raise GrammarsBusy
        try:
            if self._process is None or self._process.poll() is not None:
                self._start()
            line = self._talk(json.dumps(command | {"seconds": SECONDS}).encode() + b"\n", WAIT * SECONDS)
            if not line:
                raise OptionError(self._cause_of_exit())
        finally:
            self._lock.release()
        answer = json.loads(line)
        if answer["error"]:
            raise OptionError(answer["error"])
        return str(answer["text"])

    def _start(self) -> None:
        self.close()
        command = [sys.executable, "-m", "rest_local.grammar.trial"]
        root = Path(__file__).parents[2]  # -m looks in the working directory first, which must not be the user's
        try:
            self._process = subprocess.Popen(
                command,
                cwd=root,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C at the terminal must not reach the child
            )
        except OSError as error:
            raise GenerationError(f"grammars are compiled in a child process, which does not start: {error}") from error
        if not self._talk(b"", START_SECONDS):
            raise GenerationError(f"grammars are compiled in a child process, which ended: {self._cause_of_exit()}")

    def _talk(self, line: bytes, seconds: float) -> bytes:
        """The child's answer to a line; empty if the child ends, or is killed after `seconds`."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline()
            return answer if answer.endswith(b"\n") else b""
        except BrokenPipeError:
            return b""
        finally:
            timer.cancel()

    def _cause_of_exit(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        if code == KILLED or was_exceeded(code):
            return f"it takes more than {SECONDS:g} s to compile; make it smaller"
        return "it is too deep or too large to compile; use fewer rules that refer to each other"

    def close(self) -> None:
        """End the child."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):  # data that was not sent is not needed
                        pipe.close()


_child = _Child()
atexit.register(_child.close)


def on_large_stack(work: Callable[[], _T], stack_bytes: int) -> _T:
    """Runs `work` in a thread with a stack of this size, and returns or raises what it does."""
    done: list[_T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            if sys.platform == "linux":  # of this thread alone: threads that decode have priority
                this = os.PRIO_PROCESS, threading.get_native_id()
                os.setpriority(*this, max(os.getpriority(*this), 10))  # less than it has is for root alone
            done.append(work())
        except BaseException as error:  # raised in the caller's thread
            failed.append(error)

    with _stack_lock:  # the size applies to all threads that start now
        before = threading.stack_size(stack_bytes)
        try:
            thread = threading.Thread(target=run, name="rest-local-grammar")
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


_stack_lock = threading.Lock()


def readable(message: str) -> str:
    """The cause in a message of llguidance, as one line without its excerpt of the grammar."""
    lines = [line for line in message.splitlines() if line.strip()]
    first = lines[0] if lines else "it allows nothing"
    if first.endswith("regex parse error:"):  # the pattern and a mark below it follow, then the cause
        first += next((line.removeprefix("error:") for line in lines if line.startswith("error:")), "")
    if first.startswith("panic"):
        return "it is too large"
    first = _STOPS.get(first, first)
    return first.removeprefix("at ").replace("failed to compile JSON schema: ", "")[:300]


# The rest of this module runs in the child.


class _Bytes:
    """The smallest vocabulary: all bytes, an end token, one token for all token numbers, special tokens by name."""

    def __init__(self, names: list[str]) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)]
        self.tokens += [b"\xff<end>", b"\xff<any>", *(b"\xff" + name.encode() for name in names)]
        self.eos_token_id, self.bos_token_id, self.special_token_ids = 256, None, list[int]()

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def _compile(text: str) -> str:
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    text = _TOKEN_NUMBERS.sub("<[257]>", text)
    names = sorted(set(_TOKEN_NAMES.findall(text)) - {"<[257]>"})
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes(names)))
    matcher = on_large_stack(lambda: LLMatcher(tokenizer, text, log_level=0, limits=limits()), STACK_BYTES)

    def use() -> str:
        if not matcher.is_error():
            mask = matcher.compute_bitmask()
            if not matcher.is_error() and not any(mask):
                return "it allows nothing"
            twin = matcher.deep_copy()
            twin.validate_tokens([97, 98])
        return readable(matcher.get_error()) if matcher.is_error() else ""

    error = on_large_stack(use, SMALL_STACK_BYTES)
    if error:
        raise ValueError(error)
    return ""


def _convert(text: str) -> str:
    from llguidance.gbnf_to_lark import RepetitionNode, gbnf_to_lark

    RepetitionNode.is_atomic = lambda self: False  # type: ignore[method-assign]  # else `("a"?){2}` becomes `"a"?{2}`
    # A `root` of its own makes all of a grammar without recursion one regular expression.
    return str(gbnf_to_lark(_PARTS.sub(_plain, text) + "\nroot ::= root-all\n"))


def _plain(part: re.Match[str]) -> str:
    """A part of GBNF as the converter reads it correctly: it drops zeros of `\\u0041`, and `root` must be unused."""
    text = part[0]
    if text[0] in '"[':
        return _ESCAPES.sub(_character, text)
    return "root-all" if text == "root" else text


def _character(escape: re.Match[str]) -> str:
    if escape[0][1] not in "uU":
        return escape[0]
    point = int(escape[0][2:], 16)
    return f"\\x{point:02X}" if point < 0x80 else chr(point)


def main() -> None:
    """The child process: reads a command per line and writes an answer per line."""
    _bound()
    print("ready", flush=True)
    work: dict[str, Callable[[str], str]] = {"compile": _compile, "convert": _convert}
    for line in sys.stdin.buffer:
        (kind, text), (_, seconds) = json.loads(line).items()
        try:
            with bounded(seconds):
                answer = {"text": work[kind](text), "error": ""}
        except RecursionError:
            answer = {"text": "", "error": "brackets are nested too deeply"}
        except Exception as error:  # any exception of llguidance says what is wrong with the grammar
            answer = {"text": "", "error": readable(str(error)) or type(error).__name__}
        print(json.dumps(answer), flush=True)


def _bound() -> None:
    import llguidance  # noqa: F401 - loaded before the memory limit applies

    try:
        import resource
    except ImportError:  # Windows: only the time is limited
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    os.nice(10)  # requests that decode have priority


if __name__ == "__main__":
    main()
