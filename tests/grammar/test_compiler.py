"""A grammar that would crash or block this process ends only a child: it is refused, and the next one works."""

import errno
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from rest_local.errors import GrammarsBusy, OptionError
from rest_local.grammar import compiler, json_schema, lark
from rest_local.grammar.compiler import on_large_stack
from rest_local.sandbox import Worker


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """Yield a new child for this test, and an empty cache."""
    own = Worker(compiler.__name__, compiler.WAIT_SECONDS)
    monkeypatch.setattr(compiler, "_worker", own)
    compiler.compile_apart.cache_clear()
    yield own
    own.close()


def chain(rules: int) -> str:
    """Return rules that refer to each other, since llguidance recurses once for each."""
    return "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(rules)), f'r{rules}: "x"'])


def test_what_exhausts_the_stack_is_refused_and_the_next_works(child: Worker) -> None:
    with pytest.raises(OptionError, match="grammar: it is too deep or too large"):
        lark(chain(30_000))
    lark(chain(100))


def test_what_takes_too_long_is_refused_and_the_next_works(child: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "SECONDS", 0.5)
    endless = {"allOf": [{"type": "string", "pattern": f"x{i}"} for i in range(200)]}
    with pytest.raises(OptionError, match=r"JSON schema: it takes more than 0\.5 s"):
        json_schema(endless)
    monkeypatch.setattr(compiler, "SECONDS", 30.0)
    json_schema({"type": "string"})


def test_the_wait_for_other_grammars_is_limited(child: Worker) -> None:
    child.turn_seconds = 0.01
    with child._turn, pytest.raises(GrammarsBusy, match="try again"):
        lark('start: "a"')
    lark('start: "a"')


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux a thread has a priority of its own")
def test_a_thread_of_low_priority_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`nice rest-local` has one: a user cannot raise a priority, and the child has a lower one than this process."""
    change = os.setpriority

    def as_a_user(which: int, who: int, niceness: int) -> None:
        if niceness < os.getpriority(which, who):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        change(which, who, niceness)

    monkeypatch.setattr(os, "setpriority", as_a_user)
    found: list[int] = []

    def low() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)
        found.append(on_large_stack(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), 1 << 20))

    thread = threading.Thread(target=low)
    thread.start()
    thread.join()
    assert found == [15]
    assert on_large_stack(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), 1 << 20) >= 10


def test_a_result_or_an_error_of_a_large_stack_reaches_its_caller() -> None:
    depth = 0

    def fail() -> None:
        raise KeyError("x")

    work: Callable[[], int] = lambda: depth + 1  # noqa: E731
    assert compiler.on_large_stack(work, 1 << 20) == 1
    with pytest.raises(KeyError):
        compiler.on_large_stack(fail, 1 << 20)
    assert json.dumps(threading.stack_size()) == "0"
