"""Chat templates that loop, allocate or crash end only a child process, and the next conversation is rendered."""

from __future__ import annotations

import os
import resource
import signal
import threading

import pytest

from rest_local import processor_time
from rest_local.chat import renderer as module
from rest_local.chat.capabilities import capabilities_of
from rest_local.chat.renderer import Renderer, render
from rest_local.errors import ServiceClosed, TemplateFailed, TemplateTooCostly
from rest_local.stop import Stop

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
SAID = [{"role": "user", "content": "Hi \N{SNOWMAN}"}]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{{ '' }}{% endfor %}{% endfor %}"
HUNGRY = "{% set n = namespace(x='x' * 1000000) %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
HOSTILE = {
    "endless": ENDLESS,
    "doubling": HUNGRY,
    "width": "{{ '%01999999999d' % 1 }}",
    "format": "{{ '{:>1999999999}'.format('x') }}",
    "center": "{{ 'x' | center(1999999999) }}",
    "long": "{% for a in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
}


def rendered(template: str) -> str:
    return render(template, SAID, bos=None, eos=None)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_without_bound_is_an_error_and_the_next_is_rendered(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as limits:
        limits.setattr(module, "SECONDS", 1.0)
        with pytest.raises(TemplateFailed):
            rendered(HOSTILE[name])
    assert rendered(PLAIN) == "user: Hi \N{SNOWMAN}\n"


def test_it_is_the_child_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent's address space stays the same, except for what threads and pipes need."""
    if not os.path.exists("/proc/self/statm"):
        pytest.skip("the system does not say how large a process is")
    monkeypatch.setattr(module, "SECONDS", 3600.0)  # a busy machine takes longer than the limit to fill the memory

    def size() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")

    rendered(PLAIN)
    before = size()
    with pytest.raises(TemplateTooCostly, match="memory"):
        rendered(HUNGRY)
    assert size() - before < 200 << 20


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="the system does not tell the limits of another process")
def test_the_child_has_a_limit_of_memory_and_writes_no_core() -> None:
    own = Renderer()
    own.render(PLAIN, {"messages": SAID})
    assert own._child is not None
    assert resource.prlimit(own._child.pid, resource.RLIMIT_AS) == (module.MEMORY, module.MEMORY)
    assert resource.prlimit(own._child.pid, resource.RLIMIT_CORE) == (0, 0)
    own.close()


def test_a_template_that_takes_too_long_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It allocates nothing, so only the time limit ends it."""
    monkeypatch.setattr(module, "SECONDS", 1.0)
    idle, causes, stop = ENDLESS.replace("{{ '' }}", ""), [], Stop()

    def work() -> None:
        try:
            with stop.here():
                rendered(idle)
        except (TemplateTooCostly, ServiceClosed) as error:
            causes.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    stop.set()
    thread.join(30)
    assert len(causes) == 1
    assert "longer than 1 s" in causes[0]


@pytest.mark.skipif(not processor_time.IS_MEASURED, reason="the system has no timer of processor time")
def test_time_in_which_the_child_has_no_processor_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a busy machine: the child is stopped for longer than a template may take."""
    monkeypatch.setattr(module, "SECONDS", 0.2)
    own = Renderer()
    own.render(PLAIN, {"messages": SAID})
    assert own._child is not None
    child = own._child.pid
    os.kill(child, signal.SIGSTOP)
    going_on = threading.Timer(1.0, os.kill, (child, signal.SIGCONT))
    going_on.start()
    assert own.render(PLAIN, {"messages": SAID}) == "user: Hi \N{SNOWMAN}\n"
    assert own._child.pid == child
    going_on.join()
    own.close()


def test_a_template_that_waits_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """None can, unless it has taken over the child."""
    own = Renderer()
    own.render(PLAIN, {"messages": SAID})
    assert own._child is not None
    os.kill(own._child.pid, signal.SIGSTOP)
    with monkeypatch.context() as limits:
        limits.setattr(module, "WAIT_SECONDS", 1.0)
        with pytest.raises(TemplateTooCostly, match="longer than 1 s"):
            own.render(PLAIN, {"messages": SAID})
    assert own.render(PLAIN, {"messages": SAID})
    own.close()


def test_one_child_renders_everything() -> None:
    own = Renderer()
    names = {"messages": SAID}
    assert own.render(PLAIN, names) == own.render(PLAIN, names)
    child = own._child
    assert child is not None
    with pytest.raises(TemplateFailed, match="xpected"):
        own.render("{% if %}", names)
    with pytest.raises(TypeError):
        own.render("{% for x in none %}{% endfor %}", names)
    assert own._child is child, "an ordinary error costs no process"
    own.close()
    assert child.poll() is not None
    assert own.render(PLAIN, names)
    own.close()


def test_a_costly_template_is_tried_once_for_its_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capabilities are measured with about twenty small conversations."""
    asked = 0
    ask = Renderer._ask

    def counted(self: Renderer, request: bytes) -> bytes:
        nonlocal asked
        asked += 1
        return ask(self, request)

    monkeypatch.setattr(Renderer, "_ask", counted)
    monkeypatch.setattr(module, "SECONDS", 1.0)
    with pytest.raises(TemplateTooCostly):
        capabilities_of(ENDLESS, None, None)
    assert asked == 1


def test_a_stopped_thread_does_not_wait_for_a_template() -> None:
    """Neither a thread that renders nor one that waits for its turn."""
    own, stops, ended = Renderer(), [Stop(), Stop()], []

    def work(stop: Stop) -> None:
        with stop.here(), pytest.raises(ServiceClosed):
            own.render(ENDLESS, {"messages": SAID})
        ended.append(stop)

    threads = [threading.Thread(target=work, args=(stop,)) for stop in stops]
    for thread in threads:
        thread.start()
    for stop in reversed(stops):
        stop.set()
    for thread in threads:
        thread.join(60)
    assert len(ended) == 2
    assert own.render(PLAIN, {"messages": SAID})
    own.close()


def test_threads_take_turns() -> None:
    own, found = Renderer(), []

    def work(number: int) -> None:
        for _ in range(20):
            said = [{"role": "user", "content": str(number) * 5000}]
            found.append(own.render(PLAIN, {"messages": said}) == f"user: {str(number) * 5000}\n")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    own.close()
    assert found == [True] * 80
