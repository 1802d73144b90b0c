"""A grammar that would crash or block this process ends only a child: it is refused, and the next one works."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from rest_local import processor_time
from rest_local.errors import GenerationError, GrammarsBusy, OptionError
from rest_local.grammar import json_schema, lark, trial
from rest_local.grammar.trial import _Child, on_large_stack


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Child]:
    """A new child for this test, and an empty cache."""
    own = _Child()
    monkeypatch.setattr(trial, "_child", own)
    trial.compile_apart.cache_clear()
    yield own
    own.close()


def chain(rules: int) -> str:
    """Rules that refer to each other: llguidance recurses once for each."""
    return "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(rules)), f'r{rules}: "x"'])


def test_what_exhausts_the_stack_is_refused_and_the_next_works(child: _Child) -> None:
    with pytest.raises(OptionError, match="grammar: it is too deep or too large"):
        lark(chain(30_000))
    lark(chain(100))


def test_what_takes_too_long_is_refused_and_the_next_works(child: _Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "SECONDS", 0.5)
    endless = {"allOf": [{"type": "string", "pattern": f"x{i}"} for i in range(200)]}
    with pytest.raises(OptionError, match=r"JSON schema: it takes more than 0\.5 s"):
        json_schema(endless)
    monkeypatch.setattr(trial, "SECONDS", 30.0)
    json_schema({"type": "string"})


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="the system does not tell the limits of another process")
def test_the_child_has_a_limit_of_memory_and_writes_no_core(child: _Child) -> None:
    lark('start: "a"')
    assert child._process is not None
    assert resource.prlimit(child._process.pid, resource.RLIMIT_AS) == (trial.MEMORY_BYTES, trial.MEMORY_BYTES)
    assert resource.prlimit(child._process.pid, resource.RLIMIT_CORE) == (0, 0)


def test_a_child_that_died_between_two_grammars_is_started_again(child: _Child) -> None:
    lark('start: "a"')
    assert child._process is not None
    os.kill(child._process.pid, signal.SIGKILL)
    child._process.wait()
    lark('start: "b"')


def test_a_grammar_is_tried_once(child: _Child) -> None:
    lark('start: "a"')
    child.close()
    lark('start: "a"')
    assert child._process is None


def test_many_threads_share_the_child(child: _Child) -> None:
    answers: dict[int, bool] = {}

    def one(number: int) -> None:
        try:
            lark(f'start: "{number}"' if number % 2 else f"start: r{number}")
            answers[number] = True
        except OptionError as error:
            answers[number] = f"r{number}" not in str(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == {number: number % 2 == 1 for number in range(16)}


def test_the_wait_for_other_grammars_is_limited(child: _Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "WAIT_SECONDS", 0.01)
    with child._lock, pytest.raises(GrammarsBusy, match="try again"):
        lark('start: "a"')
    lark('start: "a"')


def test_where_no_child_can_be_started_a_grammar_is_an_error(child: _Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial.sys, "executable", "/nowhere/python")
    with pytest.raises(GenerationError, match=r"does not start: .*No such file"):
        lark('start: "a"')
    monkeypatch.setattr(trial.sys, "executable", "/bin/false")
    with pytest.raises(GenerationError, match="child process, which ended"):
        lark('start: "a"')


def test_refused_grammars_leave_no_descriptor_open(child: _Child) -> None:
    """After a hundred refusals, this process has as many open descriptors as before."""

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"))

    lark('start: "a"')
    before = descriptors()
    for number in range(100):
        with pytest.raises(OptionError):
            lark(f"start: missing{number}")
    assert descriptors() == before


def test_standard_error_is_never_redirected(child: _Child, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard error belongs to the whole process: other requests log to it."""

    def refused(*arguments: object) -> None:
        raise AssertionError("descriptor redirected")

    with monkeypatch.context() as patch:
        patch.setattr(os, "dup2", refused)
        with pytest.raises(OptionError):
            lark("start: (")


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux a thread has a priority of its own")
def test_a_thread_of_low_priority_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `nice rest-local ...`: a user cannot raise a priority, and the child has a lower one than this process."""
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


@pytest.mark.skipif(not processor_time.IS_MEASURED, reason="the system has no timer of processor time")
def test_time_in_which_the_child_has_no_processor_does_not_count(
    child: _Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a busy machine: the child is stopped for longer than a grammar may take."""
    lark('start: "a"')
    monkeypatch.setattr(trial, "SECONDS", 0.5)
    assert child._process is not None
    process = child._process.pid
    os.kill(process, signal.SIGSTOP)
    going_on = threading.Timer(1.0, os.kill, (process, signal.SIGCONT))
    going_on.start()
    lark('start: "b"')
    assert child._process.pid == process
    going_on.join()


def test_a_result_or_an_error_of_a_large_stack_reaches_its_caller() -> None:
    depth = 0

    def fail() -> None:
        raise KeyError("x")

    work: Callable[[], int] = lambda: depth + 1  # noqa: E731
    assert trial.on_large_stack(work, 1 << 20) == 1
    with pytest.raises(KeyError):
        trial.on_large_stack(fail, 1 << 20)
    assert json.dumps(threading.stack_size()) == "0"
