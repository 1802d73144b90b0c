"""Prompts with images: the answer is that of llama.cpp's own libmtmd, with drafts and without."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.images import MARK, picture, projector_for, reference

from rest_local import Engine, Sampling
from rest_local.llama.context import ContextSettings

TEXT = f"abc abc abc {MARK} and abc abc, then {MARK}{MARK}. abc abc: "
GREEDY = Sampling(temperature=0)
N = 24


@pytest.mark.parametrize(
    ("arch", "policy"),
    [("llama", "off"), ("llama", "rest"), ("gemma3", "off"), ("gemma3", "rest"),
     ("lfm2", "off"), ("lfm2", "auto"), ("qwen2vl", "off"), ("qwen2vl", "auto")],
)  # fmt: skip
def test_the_answer_is_that_of_libmtmd(arch: str, policy: str, tiny_model, tmp_path: Path) -> None:
    model, projector = tiny_model(arch), projector_for(arch, tmp_path)
    images = [picture(1), picture(2, (33, 64)), picture(3)]
    with Engine.load(model, mmproj=projector, n_ctx=512, exact=True, policy=policy, threads=1) as engine:
        settings = ContextSettings.from_dict(engine.context.backend.settings.to_dict())
        expected, told = reference(engine.model, projector, settings, TEXT, images, N)
        marks = {f"<image {i}>": data for i, data in enumerate(images)}
        text = TEXT
        for mark in marks:
            text = text.replace(MARK, mark, 1)
        prompt, chunks = engine.image_prompt(text, marks)
        for _ in range(2):  # again with everything in the cells
            stream = engine.generate(prompt, images=chunks, max_tokens=N, sampling=GREEDY, logprobs=3)
            found = [each for piece in stream for each in piece.logprobs]
            result = stream.result
            assert result.tokens == expected
            assert found == told[: len(found)]  # every bit
        assert engine.projector is not None
        assert engine.projector.encoded == 3
        if policy == "rest" and engine.capability.kind != "none":
            assert result.draft.drafted
