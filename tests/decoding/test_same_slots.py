"""On a CPU the same request has the same bits, whatever came before it and in whichever slot it runs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rest_local import Engine
from rest_local.calibration.settings import SAME

TinyModel = Callable[..., Path]
ASKED = "def area(width, height):\n    return width * height\n\n\ndef volume(width"
OTHERS = (
    "x" * 90,
    "import os\n",
    "a long line of text that repeats itself, " * 9,
    "class A:\n    pass\n",
    ASKED[:60] + "!",
)


@pytest.mark.usefixtures("measured_prices")
@pytest.mark.parametrize("policy", ["off", "auto"])
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_an_equal_request_has_equal_bits_whatever_came_before(tiny_model: TinyModel, arch: str, policy: str) -> None:
    with Engine.load(tiny_model(arch, quant="Q8_0"), n_ctx=512, slots=3, policy=policy, threads=1) as engine:
        settings = engine.settings
        assert (settings["flash_attention"], settings["cache_type_k"], settings["cache_type_v"]) in SAME
        answers = set()
        for round_number in range(12):
            result = engine.generate(ASKED, max_tokens=30, ignore_end=True, logprobs=0).wait()
            answers.add(tuple(each.logprob for each in result.logprobs))
            for other in OTHERS[: round_number % len(OTHERS) + 1]:
                engine.generate(other, max_tokens=5 + 9 * (round_number % 3)).wait()
        assert len(answers) == 1
