"""Child processes for hostile work: whatever becomes of a child, this process survives, and the next request works."""

import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from rest_local import sandbox
from rest_local.chat import renderer
from rest_local.chat.renderer import render_limited
from rest_local.errors import ServiceClosed
from rest_local.grammar import compiler
from rest_local.llama import picture
from rest_local.sandbox import Busy, Died, NotStarted, TookTooLong, Worker
from rest_local.stop import Stop

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ECHO = """
import os, sys, time
from rest_local import sandbox
def answer(request):
    {does}
    return request
sandbox.serve(answer, 1 << 30)
"""


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """Yield a child whose module is code: what it does before it answers with the request."""
    monkeypatch.setattr(sandbox, "command", lambda code: [sys.executable, "-c", ECHO.format(does=code)])
    own = Worker("pass")
    yield own
    own.close()


def pid(worker: Worker) -> int:
    assert worker.process is not None
    return worker.process.pid


def test_one_child_answers_everything(worker: Worker) -> None:
    assert worker.ask(b"a", 5.0) == b"a"
    child = pid(worker)
    assert worker.ask(b"b" * 10**7, 5.0) == b"b" * 10**7
    assert pid(worker) == child
    os.kill(child, signal.SIGKILL)
    assert worker.process is not None
    worker.process.wait()
    assert worker.ask(b"", 5.0) == b""


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="the system does not tell the limits of another process")
@pytest.mark.parametrize("module", [renderer, compiler, picture], ids=lambda module: module.__name__)
def test_every_child_has_a_limit_of_memory_and_writes_no_core(module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Worker(module.__name__)  # type: ignore[attr-defined]
    own._running()
    assert resource.prlimit(pid(own), resource.RLIMIT_AS) == (1 << 30, 1 << 30)
    assert resource.prlimit(pid(own), resource.RLIMIT_CORE) == (0, 0)
    own.close()


@pytest.mark.parametrize(
    ("does", "error"),
    [
        ("while True: pass", TookTooLong),
        ("time.sleep(60)", TookTooLong),
        ("os.abort()", Died),
        ("os._exit(0)", Died),
        ("bytearray(1 << 40)", Died),
        ("os.write(1, bytes(8) + b'more')", Died),
        ("os.write(1, b'\\xff' * 8)", Died),
        ("while True: os.write(1, bytes(1 << 20))", Died),
        ("request = bytes(1001)", Died),
    ],
)
def test_a_child_that_fails_or_was_taken_over_ends_and_the_next_works(
    worker: Worker, does: str, error: type[Exception]
) -> None:
    worker.module = does
    with pytest.raises(error):
        worker.ask(b"x", 0.3, 1.0, 1000)
    assert worker.process is None
    worker.module = "pass"
    assert worker.ask(b"x", 5.0) == b"x"


def test_a_child_that_does_not_read_costs_no_more_than_its_time(worker: Worker) -> None:
    worker.ask(b"", 5.0)
    os.kill(pid(worker), signal.SIGSTOP)
    with pytest.raises(TookTooLong):
        worker.ask(bytes(1 << 22), 5.0, wait=0.1)  # more than a pipe holds
    assert worker.ask(b"next", 5.0) == b"next"


def test_a_child_that_does_not_start_is_told_apart(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    for command, cause in (("/nowhere/python", "No such file"), ("/bin/false", "ended before it began")):
        monkeypatch.setattr(sandbox, "command", lambda module, command=command: [command])
        with pytest.raises(NotStarted, match=cause):
            worker.ask(b"", 5.0)


def test_time_in_which_the_child_has_no_processor_does_not_count(worker: Worker) -> None:
    """The child is stopped for longer than a request may take, as on a busy machine."""
    worker.ask(b"a", 5.0)
    child = pid(worker)
    os.kill(child, signal.SIGSTOP)
    going_on = threading.Timer(1.0, os.kill, (child, signal.SIGCONT))
    going_on.start()
    assert worker.ask(b"b", 0.2) == b"b"
    assert pid(worker) == child
    going_on.join()


def test_threads_take_turns(worker: Worker) -> None:
    found = []

    def work(number: int) -> None:
        for _ in range(20):
            request = str(number).encode() * 5000
            found.append(worker.ask(request, 5.0) == request)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [True] * 80


def test_the_wait_for_other_requests_is_limited(worker: Worker) -> None:
    worker.turn_seconds = 0.01
    with worker._turn, pytest.raises(Busy):
        worker.ask(b"a", 5.0)
    assert worker.ask(b"a", 5.0) == b"a"


def test_a_stopped_thread_does_not_wait() -> None:
    """That holds for a thread whose request runs and for one that waits for its turn."""
    own, stops, ended = Worker(renderer.__name__), [Stop(), Stop()], []

    def work(stop: Stop) -> None:
        with stop.here(), pytest.raises(ServiceClosed):
            render_limited(ENDLESS, {}, own)
        ended.append(stop)

    threads = [threading.Thread(target=work, args=(stop,)) for stop in stops]
    for thread in threads:
        thread.start()
    for stop in reversed(stops):
        stop.set()
    for thread in threads:
        thread.join(60)
    assert len(ended) == 2
    assert render_limited("x", {}, own) == "x"
    own.close()


def test_failures_leave_no_descriptor_open(worker: Worker) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"))

    before = descriptors()
    worker.module = "os._exit(1)"
    for _ in range(3):
        with pytest.raises(Died):
            worker.ask(b"", 5.0)
    assert descriptors() == before
