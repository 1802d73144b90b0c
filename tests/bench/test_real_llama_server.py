"""The real llama-server as a side: it gives this project's plain answers, and its faults are told.

REST_LOCAL_LLAMA_SERVER names the program, of the llama.cpp that llama-cpp-python contains. docs/howto/peer-drafts.md
says how to build it. Without it the tests are skipped.
"""

from __future__ import annotations

import collections
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from support.programs import gone

from benchmarks.peer_drafts import Target
from rest_local.bench.comparing.llama_server import PLAIN, LlamaServer, sides_of
from rest_local.bench.comparing.sides import Side, SideFailed, Task
from rest_local.llama.model import Model
from rest_local.paths import demo_model

REAL = os.environ.get("REST_LOCAL_LLAMA_SERVER", "")
pytestmark = pytest.mark.skipif(
    not REAL, reason="REST_LOCAL_LLAMA_SERVER names no llama-server: docs/howto/peer-drafts.md"
)
PROMPT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef add(a, b):\n"
HEADS: dict[str, Path | None] = {
    "draft-simple": demo_model(),
    "draft-eagle3": Path(__file__).parents[2] / "models" / "demo-eagle3.gguf",
}


def real_side(name: str, *, model: Path | None = None, n_ctx: int = 512) -> Side:
    sides = sides_of(REAL, model or demo_model(), HEADS, 1, n_ctx)
    return {side.name.removeprefix("llama-server").strip() or PLAIN: side for side in sides}[name]


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with Model.open(demo_model(), n_gpu_layers=0) as model, closing(Target(model)) as target:
        yield target


def asked(target: Target, text: str = PROMPT, n: int = 64) -> Task:
    return Task("real", "completion", target.model.vocabulary.tokenize(text).tolist(), n)


def plain(target: Target, task: Task) -> list[int]:
    """The greedy answer of this project's context, without drafts."""
    collections.deque(target.begin(task.prompt[:-1]), 0)
    tokens = [task.prompt[-1]]
    for _ in range(task.max_tokens):
        tokens.append(target.verify(tokens[-1], [])[0][0])
        target.accept(0)
    return tokens[1:]


@pytest.mark.parametrize(
    "name", [PLAIN, "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache", *HEADS]
)
def test_the_real_server_gives_the_plain_answer_with_each_type(name: str, target: Target) -> None:
    """Or it differs first where this project finds its token nearly as likely."""
    task, opened = asked(target), real_side(name)
    opened.open()
    try:
        run = opened.run(task)
    finally:
        opened.close()
    expected = plain(target, task)
    at = next((i for i, pair in enumerate(zip(expected, run.tokens, strict=False)) if pair[0] != pair[1]), None)
    if at is not None:
        collections.deque(target.begin([*task.prompt, *expected[: at - 1]]), 0)
        assert run.tokens[at] in target.verify(expected[at - 1], [])[0]
    assert len(run.tokens) == len(expected)
    assert run.ms > 0
    assert run.steps + run.accepted == len(run.tokens) - 1
    assert (run.drafted > 0) >= name.startswith("draft-")


@pytest.mark.parametrize("what", ["cut", "garbage", "missing"])
def test_a_model_that_the_real_server_cannot_load_is_told(what: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    if what != "missing":
        path.write_bytes(demo_model().read_bytes()[:20000] if what == "cut" else b"no model")
    with pytest.raises(SideFailed, match=r"ends at its start with exit code 1; it wrote: .*model"):
        real_side(PLAIN, model=path).open()


def test_a_prompt_over_the_context_is_told(target: Target) -> None:
    opened = real_side(PLAIN, n_ctx=256)
    opened.open()
    with pytest.raises(SideFailed, match="exceed"):
        opened.run(asked(target, PROMPT * 50))


def test_the_real_server_is_killed_in_the_middle_of_an_answer(target: Target) -> None:
    opened = real_side(PLAIN, n_ctx=2048)
    assert isinstance(opened, LlamaServer)
    opened.open()
    assert opened._server is not None
    pid, port = opened._server.pid, opened._server.port
    killer = threading.Timer(0.2, os.kill, (pid, signal.SIGKILL))
    killer.start()
    with pytest.raises(SideFailed, match=r"ends in the middle of an answer with signal 9 \(SIGKILL\)"):
        opened.run(asked(target, PROMPT, 1900))
    killer.join()
    assert gone(pid, port)


def test_the_real_server_follows_a_schema(target: Target) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"]}
    opened = real_side("ngram-simple")
    opened.open()
    run = opened.run(replace(asked(target), schema=schema))
    opened.close()
    text = b"".join(target.model.vocabulary.piece(token) for token in run.tokens)
    assert list(json.loads(text)) == ["n"]
