"""What fills the options of sampling that a request leaves open: the program's options, the model's file, llama.cpp."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.keys import with_keys

from rest_local import Engine, Sampling
from rest_local.errors import OptionError
from rest_local.llama.options import SAMPLERS
from rest_local.llama.sampling_defaults import SamplingDefaults, recommended, sampler_order

KEYS = {
    "general.sampling.temp": 0.25,
    "general.sampling.top_k": 7,
    "general.sampling.top_p": 0.5,
    "general.sampling.min_p": "0.125",
    "general.sampling.xtc_probability": 0.5,
    "general.sampling.xtc_threshold": 0.25,
    "general.sampling.penalty_repeat": 1.5,
    "general.sampling.penalty_last_n": -1,
    "general.sampling.mirostat": 0,
    "general.sampling.mirostat_tau": 4.0,
    "general.sampling.mirostat_eta": 0.5,
    "general.sampling.sequence": "top_k;temperature;min-p;XTC",
}


def test_an_engine_samples_as_the_file_recommends(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    wrong = {"general.sampling.top_k": "many", "general.sampling.top_p": 1.5}
    with Engine.load(with_keys(tiny_model("llama"), tmp_path / "a.gguf", KEYS), n_ctx=64) as engine:
        assert engine.sampling(seed=1) == Sampling(
            temperature=0.25, top_k=7, min_p=0.125, xtc_probability=0.5, xtc_threshold=0.25, repeat_penalty=1.0,
            repeat_last_n=-1, mirostat_tau=4.0, mirostat_eta=0.5, seed=1,
            samplers=("top_k", "temperature", "min_p", "xtc"),
        )  # fmt: skip
        assert engine.warnings == []
    path = with_keys(tiny_model("llama"), tmp_path / "b.gguf", {**KEYS, **wrong})
    with Engine.load(path, n_ctx=64, sampling={"top_k": 3, "temperature": 0.0}) as engine:
        assert (engine.sampling().top_k, engine.sampling().temperature, engine.sampling().min_p) == (3, 0.0, 0.125)
        assert [[part in warning for warning in engine.warnings] for part in ("top_k = 'many'", "top_p = '1.5")] == [
            [True, False],
            [False, True],
        ]
        assert engine.generate("x", max_tokens=1).wait().tokens  # greedy, as ever: nothing was named


@pytest.mark.parametrize(
    ("name", "text"),
    [("temp", "-1"), ("temp", "nan"), ("temp", "true"), ("temp", "[0.5]"), ("temp", ""), ("top_k", "1.5"),
     ("top_p", "inf"), ("mirostat", "3"), ("penalty_repeat", "0"), ("sequence", "top_k;quadratic")],
)  # fmt: skip
def test_a_recommendation_that_cannot_be_followed_is_left_out_and_named(name: str, text: str) -> None:
    key = f"general.sampling.{name}"
    found, warnings = recommended({key: text, "general.sampling.min_p": "0.1", "general.name": "x"})
    assert found == {"min_p": 0.1}
    assert len(warnings) == 1
    assert f"{key} = {text!r}" in warnings[0]


def test_numbers_are_read_as_llama_cpp_writes_them() -> None:
    found, warnings = recommended({f"general.sampling.{name}": text for name, text in
                                   (("top_k", "20.000000"), ("temp", "1"), ("unknown", "x"))})  # fmt: skip
    assert (found, warnings) == ({"top_k": 20, "temperature": 1.0}, [])
    assert recommended({"general.sampling.top_k": "-1"}) == ({"top_k": 0}, [])


def test_the_request_comes_before_the_options_and_these_before_the_file() -> None:
    defaults = SamplingDefaults({"top_k": 5, "min_p": 0.5}, {"top_k": 6, "min_p": 0.6, "top_p": 0.7})
    sampling = defaults(min_p=0.4)
    assert (sampling.min_p, sampling.top_k, sampling.top_p, sampling.temperature) == (0.4, 5, 0.7, 0.8)
    origins = defaults.origins(min_p=0.4)
    found = [origins[name] for name in ("min_p", "top_k", "top_p", "temperature")]
    assert found == [(0.4, "set"), (5, "option"), (0.7, "model file"), (0.8, "default")]
    with pytest.raises(OptionError, match="top_p"):
        defaults(top_p=2.0)


@pytest.mark.parametrize(
    ("advice", "named", "effective"),
    [
        ({"mirostat": 2}, {}, {"mirostat": 2, "top_k": 0}),
        ({"mirostat": 2}, {"temperature": 0.5}, {"mirostat": 2, "temperature": 0.5}),
        ({"mirostat": 2}, {"top_k": 3}, {"mirostat": 0, "top_k": 3, "top_p": 0.95}),
        ({"mirostat": 2}, {"mirostat": 0}, {"mirostat": 0, "top_k": 40}),
        ({"samplers": ("top_p", "temperature")}, {}, {"top_k": 0, "top_p": 0.95}),
        ({"samplers": ("top_p", "temperature")}, {"top_p": 0.3}, {"top_k": 0, "top_p": 0.3}),
        ({"samplers": ("top_p", "temperature")}, {"top_k": 3}, {"top_k": 3, "samplers": tuple(SAMPLERS)}),
        ({"temperature": 1.0}, {"samplers": ("temperature",)}, {"temperature": 1.0, "top_k": 0}),
    ],
)
def test_a_file_that_fights_a_request_loses(
    advice: dict[str, Any], named: dict[str, Any], effective: dict[str, Any]
) -> None:
    sampling = SamplingDefaults({}, advice)(**named)
    assert {name: getattr(sampling, name) for name in effective} == effective


def test_samplers_are_named_as_llama_cpp_names_them() -> None:
    assert sampler_order("edskypmxt") == tuple(SAMPLERS)
    assert sampler_order(["Top-K", "topp", "temp", "typ", "adaptive_p", "infill", "temperature"]) == (
        "top_k", "top_p", "temperature", "typ_p", "infill",
    )  # fmt: skip
    for wrong in ("kz", ["top_k", "tfs_z"]):
        with pytest.raises(OptionError, match="samplers"):
            sampler_order(wrong)


def test_an_option_of_an_engine_is_checked() -> None:
    for wrong, name in (({"top_k": -1}, "top_k"), ({"topk": 1}, "topk")):
        with pytest.raises(OptionError, match=name):
            Engine.load("none.gguf", sampling=wrong)
