"""Work done late over llama.cpp's own cells and logits, as on a GPU: the answers are those of doing it at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rest_local.decoding.engine import Engine
from rest_local.decoding.forward import Forward
from rest_local.decoding.request import Request
from rest_local.decoding.service import Service
from rest_local.decoding.stream import Result
from rest_local.llama.options import Sampling

PROMPT = "def main():\n    for x in range(3):\n"


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Engines that are loaded from then on do it late, or at once."""
    made = Forward.__init__

    def choose(overlaps: bool) -> None:
        def init(self: Forward, backend: Any, capability: Any, make_room: Any = lambda: False, _: Any = None) -> None:
            made(self, backend, capability, make_room, overlaps)

        monkeypatch.setattr(Forward, "__init__", init)

    return choose


@pytest.mark.parametrize("policy", ["off", "auto", "respec"])
def test_answers_log_probabilities_and_stops_are_the_same(
    policy: str, tiny_model: Callable[..., Path], late: Callable[[bool], None]
) -> None:
    """In exact mode, to the bit; closing the engine in the middle of an answer keeps what was said."""
    model = tiny_model("llama", quant="Q8_0")
    told: dict[bool, list[Result]] = {}
    for overlaps in (False, True):
        late(overlaps)
        with Engine.load(model, n_ctx=512, exact=True) as engine:
            prompt = engine.tokenize(PROMPT)
            whole = engine.generate(prompt, max_tokens=80, policy="off")
            text = "".join(piece.text for piece in whole)
            engine.forget()
            with Service(engine) as service:
                requests = [
                    Request(prompt, max_tokens=80, policy=policy, logprobs=3),
                    Request(prompt, max_tokens=80, policy=policy, stop=(text[30:33],)),
                    Request(prompt, max_tokens=80, policy=policy, sampling=Sampling(temperature=0.8, seed=5)),
                ]
                told[overlaps] = [service.submit(request).wait(60) for request in requests]
            unfinished = engine.generate(prompt, max_tokens=80, policy=policy)
            for _ in range(5):
                next(iter(unfinished))
        assert 5 <= len(unfinished.result.tokens) < 80
        assert unfinished.result.finish_reason == "cancelled"
        assert unfinished.result.tokens == whole.result.tokens[: len(unfinished.result.tokens)]
        assert unfinished.statistics.generated == len(unfinished.result.tokens)
        told[overlaps].append(unfinished.result)
    for once, after in zip(told[False][:3], told[True][:3], strict=True):
        assert (after.tokens, after.text, after.finish_reason) == (once.tokens, once.text, once.finish_reason)
        assert after.logprobs == once.logprobs
        assert after.stopping_word == once.stopping_word
    assert len(told[True][3].tokens) == len(told[False][3].tokens) + 1 or policy != "off"
