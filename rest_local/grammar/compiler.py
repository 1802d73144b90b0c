"""Compile grammars for a vocabulary, each in a child process first.

A hostile grammar can end the process that compiles it. With llguidance 1.9.1, a chain of 2 000 rules that refer to each
other exhausts a stack of 1 MiB (SIGSEGV), and a schema with 200 patterns in `allOf` compiles for more than 30 s. So
`compile_apart` compiles each new grammar in a child (`rest_local.sandbox`) with limits of time, memory and stack. One
that passes is compiled again in this process, by the same code and with a larger stack, in a thread that does not hold
the GIL, so that other requests go on. `Tokens.matcher` gives each answer a state of its own. Thread-safe.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from rest_local import sandbox
from rest_local.errors import GenerationError, GrammarsBusy, OptionError
from rest_local.sandbox import Worker

SECONDS = 5.0  # processor time of one grammar; an enum of 50 000 integers takes 0.4 s
WAIT_SECONDS = 10.0  # maximum wait for other grammars, as a waiting request occupies a thread of the server
MEMORY_BYTES = 1 << 30
STACK_BYTES = 64 << 20  # stack of the thread that compiles in the child; this process uses twice as much
SMALL_STACK_BYTES = 256 << 10  # half of what macOS gives a thread: masks are computed in any thread
_KEPT = 32  # compiled grammars, each twice; clients send the same schema or tools with every request
_SPECIAL = b"\xff"  # the first byte of tokens that are not text, for llguidance

_T = TypeVar("_T")
# Some messages of llguidance contain only its name for the reason why a parser ends.
_STOPS = dict.fromkeys(("NoExtension", "NoExtensionBias"), "it allows nothing") | dict.fromkeys(
    ("ParserTooComplex", "LexerTooComplex"), "it is too large"
)


def limits() -> LLParserLimits:
    """Limit a mask, and the lexer states, 1 to 2 kB each. The defaults are 50 000, 200 000 and 250 000."""
    return LLParserLimits(step_max_items=20_000, step_lexer_fuel=100_000, max_lexer_states=50_000, verbose_errors=False)


class _Pieces:
    """The interface that llguidance's `TokenizerWrapper` expects."""

    def __init__(self, tokens: list[bytes], end: int, encode: Callable[[str | bytes], Sequence[int]]) -> None:
        self.tokens, self.eos_token_id, self.bos_token_id = tokens, end, None
        self.special_token_ids: list[int] = []
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        return list(self._encode(text))


class Tokens:
    """The tokens of one vocabulary. `special` tokens match only their name in a grammar, never text; `ends`, which
    count as special, are allowed when the text is complete. With 152 000 tokens this takes 0.4 s, in which llguidance
    holds the GIL: construct it before the first request.
    """

    def __init__(
        self,
        pieces: Sequence[bytes],
        special: Collection[int],
        ends: Sequence[int],
        encode: Callable[[str | bytes], Sequence[int]],
    ) -> None:
        hidden = {*special, *ends}
        marked = [_SPECIAL + piece if token in hidden else piece for token, piece in enumerate(pieces)]
        if not ends:
            marked.append(_SPECIAL + b"<end>")  # llguidance requires one; the model never generates it
        known = list(ends) or [len(pieces)]
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Pieces(marked, known[0], encode)), eos_token=known)
        self._compiled: OrderedDict[tuple[str, bool], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._encode = encode
        self.pieces = [b"" if token in hidden else piece for token, piece in enumerate(pieces)]
        self.of_byte = [-1] * 256  # the token that is this byte alone, or -1
        for token, piece in enumerate(self.pieces):
            if len(piece) == 1 and self.of_byte[piece[0]] < 0:
                self.of_byte[piece[0]] = token
        adds_space = (
            b"".join(self.pieces[token] for token in encode(b"a")) != b"a"
        )  # SentencePiece does, to the first word
        self._beginning = b"\n" if adds_space else b""

    def split(self, before: Sequence[int], text: bytes) -> dict[int, int]:
        """Return the tokens that the vocabulary splits `text` into after the tokens `before`, by their place in it. A
        token can reach from `before` into the text; then none is at place 0. A character that is cut off at the end of
        the text is left out. Takes 12 us.
        """
        context = b"".join(self.pieces[token] for token in before) or self._beginning
        try:
            place = len(codecs.utf_8_decode(text, "strict", False)[0].encode())
        except UnicodeDecodeError:
            return {}
        tokens = list(self._encode(context + text[:place]))
        found: dict[int, int] = {}
        while tokens and place > 0:
            token = tokens.pop()
            place -= len(self.pieces[token])
            if place >= 0:
                found[place] = token
        return found

    def matcher(self, text: str, ahead: bool = False) -> LLMatcher:
        """Return the state at the beginning of a text. `text` is `Grammar.compiled_text`. Costs 0.02 ms for a grammar
        that was compiled before, 3 ms for a new schema of 30 properties.

        A matcher to look `ahead` is compiled apart: all matchers that were compiled together share the states of their
        lexer, which are limited. Looking ahead in a text of 100 kB uses them up, and that must not end an answer.
        Raises OptionError for a grammar that cannot be compiled for this vocabulary: it names a special token that does
        not exist, or no token begins a text of its language.
        """
        key = text, ahead
        with self._lock:  # compile one grammar at a time, so that the other cores decode
            if key not in self._compiled:
                self._compiled[key] = on_large_stack(lambda: self._compile(text), 2 * STACK_BYTES)
            self._compiled.move_to_end(key)
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            return self._compiled[key].deep_copy()

    def _compile(self, text: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=limits())
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error() or not any(mask):
            raise OptionError(f"grammar: {readable(matcher.get_error())}")
        return matcher


def on_large_stack(work: Callable[[], _T], stack_bytes: int) -> _T:
    """Run `work` in a thread with a stack of this size, and return its result or raise its error."""
    done: list[_T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            # Threads that decode have priority. On Linux the value is the thread's, and only root may lower it again.
            if sys.platform == "linux":
                this = os.PRIO_PROCESS, threading.get_native_id()
                os.setpriority(*this, max(os.getpriority(*this), 10))
            done.append(work())
        except BaseException as error:  # The caller's thread raises it.
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
    """Return the cause in a message of llguidance, as one line without its excerpt of the grammar."""
    lines = [line for line in message.splitlines() if line.strip()]
    first = lines[0] if lines else "it allows nothing"
    if first.endswith("regex parse error:"):  # the pattern and a mark below it follow, then the cause
        first += next((line.removeprefix("error:") for line in lines if line.startswith("error:")), "")
    if first.startswith("panic"):
        return "it is too large"
    first = _STOPS.get(first, first)
    return first.removeprefix("at ").replace("failed to compile JSON schema: ", "")[:300]


_worker = Worker(__name__, WAIT_SECONDS)


@lru_cache(maxsize=64)
def compile_apart(text: str) -> None:
    """Check that a grammar compiles within the limits and allows a first token. Raises OptionError, and as `_ask`."""
    _ask("compile", text)


@lru_cache(maxsize=64)
def convert(text: str) -> str:
    """Translate GBNF to Lark. Raises OptionError, and as `_ask`."""
    return _ask("convert", text)


def _ask(kind: str, text: str) -> str:
    """Ask the child. Raises OptionError for a grammar that fails, GrammarsBusy after WAIT_SECONDS, GenerationError if
    there is no child process, ServiceClosed if the thread was stopped.
    """
    try:
        answer = json.loads(_worker.ask(json.dumps([kind, text]).encode(), SECONDS))
    except sandbox.Busy:
        raise GrammarsBusy from None
    except sandbox.NotStarted as error:
        raise GenerationError(f"grammars are compiled in a child process: {error}") from error
    except sandbox.TookTooLong:
        raise OptionError(f"it takes more than {SECONDS:g} s to compile; make it smaller") from None
    except sandbox.Died:
        cause = "it is too deep or too large to compile; use fewer rules that refer to each other"
        raise OptionError(cause) from None
    if answer["error"]:
        raise OptionError(answer["error"])
    return str(answer["text"])


# The rest of this module runs in the child.

_ESCAPES = re.compile(r"\\(?:u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_PARTS = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|[\w-]+', re.DOTALL)
_TOKEN_NAMES = re.compile(r"<[^<>\s\"]{1,64}>")
_TOKEN_NUMBERS = re.compile(r"<\[[\d,\s-]*\]>")


def _answer(request: bytes) -> bytes:
    kind, text = json.loads(request)
    try:
        answer = {"text": _converted(text) if kind == "convert" else _compiled(text), "error": ""}
    except RecursionError:
        answer = {"text": "", "error": "brackets are nested too deeply"}
    except Exception as error:  # llguidance's exceptions name the fault of the grammar
        answer = {"text": "", "error": readable(str(error)) or type(error).__name__}
    return json.dumps(answer).encode()


def _compiled(text: str) -> str:
    """Compile with the smallest vocabulary: all bytes, an end token, one token for all token numbers, special tokens by
    name. Raises ValueError, and the errors of llguidance.
    """
    text = _TOKEN_NUMBERS.sub("<[257]>", text)
    names = sorted(set(_TOKEN_NAMES.findall(text)) - {"<[257]>"})
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [_SPECIAL + b"<end>", _SPECIAL + b"<any>", *(_SPECIAL + name.encode() for name in names)]
    pieces = _Pieces(tokens, 256, lambda text: list(text.encode() if isinstance(text, str) else text))
    tokenizer = LLTokenizer(TokenizerWrapper(pieces))
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


def _converted(text: str) -> str:
    from llguidance.gbnf_to_lark import RepetitionNode, gbnf_to_lark

    RepetitionNode.is_atomic = lambda self: False  # type: ignore[method-assign]  # or `("a"?){2}` becomes `"a"?{2}`
    # A `root` of its own makes all of a grammar without recursion one regular expression.
    return str(gbnf_to_lark(_PARTS.sub(_plain, text) + "\nroot ::= root-all\n"))


def _plain(part: re.Match[str]) -> str:
    """Rewrite a part of GBNF for the converter, which drops zeros of `\\u0041`, and needs the name `root` unused."""
    text = part[0]
    if text[0] in '"[':
        return _ESCAPES.sub(_character, text)
    return "root-all" if text == "root" else text


def _character(escape: re.Match[str]) -> str:
    if escape[0][1] not in "uU":
        return escape[0]
    point = int(escape[0][2:], 16)
    return f"\\x{point:02X}" if point < 0x80 else chr(point)


if __name__ == "__main__":
    sandbox.serve(_answer, MEMORY_BYTES, niceness=10)  # requests that decode have priority
