"""Chat templates that loop, allocate or crash end only a child process, and the next conversation is rendered."""

import os
from collections.abc import Iterator

import pytest

from rest_local.chat import renderer as module
from rest_local.chat.renderer import render, render_limited
from rest_local.errors import TemplateFailed, TemplateTooCostly
from rest_local.sandbox import Worker

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
SAID = [{"role": "user", "content": "Hi \N{SNOWMAN}"}]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{{ '' }}{% endfor %}{% endfor %}"
HUNGRY = "{% set n = namespace(x='x' * 1000000) %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
HOSTILE = {
    "endless": ENDLESS,
    "idle": ENDLESS.replace("{{ '' }}", ""),  # allocates nothing, so only the time limit ends it
    "doubling": HUNGRY,
    "width": "{{ '%01999999999d' % 1 }}",
    "format": "{{ '{:>1999999999}'.format('x') }}",
    "center": "{{ 'x' | center(1999999999) }}",
    "long": "{% for a in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
}


@pytest.fixture
def own() -> Iterator[Worker]:
    worker = Worker(module.__name__)
    yield worker
    worker.close()


def rendered(template: str) -> str:
    return render(template, SAID, bos=None, eos=None)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_without_bound_is_an_error_and_the_next_is_rendered(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as limits:
        limits.setattr(module, "SECONDS", 0.2)
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


def test_an_ordinary_error_costs_no_process(own: Worker) -> None:
    names = {"messages": SAID}
    assert render_limited(PLAIN, names, own) == "user: Hi \N{SNOWMAN}\n"
    child = own.process
    with pytest.raises(TemplateFailed, match="xpected"):
        render_limited("{% if %}", names, own)
    with pytest.raises(TypeError):
        render_limited("{% for x in none %}{% endfor %}", names, own)
    assert own.process is child


@pytest.mark.parametrize("answer", [b"", b"{", b"[" * 10_000, b"\xff"])
def test_an_answer_of_a_child_that_was_taken_over_is_an_error(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "ask", lambda *_: answer)
    with pytest.raises(TemplateTooCostly, match="ended the process"):
        rendered(PLAIN)
