"""Load options: invalid values are refused on construction, valid ones reach llama.cpp."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rest_local.errors import ModelInvalid, OptionError
from rest_local.llama.loading import LoadParameters
from rest_local.llama.model import Model
from rest_local.llama.options import ModelOptions, Override, Placement

TinyModel = Callable[..., Path]


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"flash_attention": "yes"}, "auto, on, off"),
        ({"cache_type_k": "q3_k"}, "q8_0"),
        ({"cache_type_v": ""}, "cache type V"),
        ({"cache_type_v": "q8_0", "flash_attention": "off"}, "needs flash attention"),
        ({"split_mode": "half"}, "none, layer, row"),
        ({"numa": "spread"}, "distribute"),
        ({"main_gpu": -1}, "main gpu is -1"),
        ({"n_ubatch": -1}, "n ubatch is -1"),
        ({"threads_batch": -2}, "threads batch is -2"),
        ({"n_batch": 0}, "batch of 0"),
        ({"tensor_split": (1.0, -1.0)}, "tensor split"),
        ({"tensor_split": (0.0, 0.0)}, "above 0"),
        ({"tensor_split": (math.nan,)}, "tensor split"),
    ],
)
def test_invalid_values_are_refused_on_construction(options: dict[str, Any], cause: str) -> None:
    with pytest.raises(OptionError, match=cause) as caught:
        ModelOptions(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "a", "a=int", "a=int:", "a=int:x", "a=int:9223372036854775808", "a=bool:1", "a=float:y", "=int:1",
             "a=array:1", f"{'k' * 128}=int:1", f"a=str:{'ü' * 64}", "a=str:\0"]
)  # fmt: skip
def test_overrides_that_llama_cpp_cannot_hold_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="override"):
        Override.parse(text)


@given(st.text(min_size=1).filter(lambda s: "=" not in s and "\0" not in s), st.text().filter(lambda s: "\0" not in s))
def test_an_override_keeps_its_value_or_is_refused(key: str, value: str) -> None:
    fits = max(len(key.encode("utf-8", "surrogatepass")), len(value.encode("utf-8", "surrogatepass"))) < 128
    if fits:
        assert Override.parse(f"{key}=str:{value}") == Override(key, "str", value)
    else:
        with pytest.raises(OptionError):
            Override.parse(f"{key}=str:{value}")


def test_every_kind_of_override_reaches_llama_cpp() -> None:
    texts = ("a=int:-3", "b=float:0.5", "c=bool:true", "d=str:yarn")
    options = ModelOptions(override_kv=tuple(Override.parse(text) for text in texts))
    entries = LoadParameters.of(options, 0, vocab_only=False).struct.kv_overrides
    assert [(entries[i].key, entries[i].tag) for i in range(4)] == [(b"a", 0), (b"b", 1), (b"c", 2), (b"d", 3)]
    values = [entries[i].value for i in range(4)]
    assert (values[0].val_i64, values[1].val_f64, values[2].val_bool) == (-3, 0.5, True)
    assert values[3].val_str == b"yarn"
    assert entries[4].key == b""


def test_an_unknown_buffer_or_invalid_pattern_is_refused_in_one_line(tiny_model: TinyModel) -> None:
    with pytest.raises(OptionError, match=r"this llama.cpp has CPU"):
        Model.open(tiny_model("llama"), options=ModelOptions(override_tensor=(Placement("a", "TPU9"),)))
    with pytest.raises(ModelInvalid, match="regular expression"):
        Model.open(tiny_model("llama"), options=ModelOptions(override_tensor=(Placement("(", "CPU"),)))
    with pytest.raises(OptionError, match="at most"):
        Model.open(tiny_model("llama"), options=ModelOptions(n_cpu_moe=100_000))
    with pytest.raises(OptionError, match="GPUs"):
        Model.open(tiny_model("llama"), options=ModelOptions(tensor_split=(1.0,) * 100))


def test_check_tensors_finds_damaged_weights(tiny_model: TinyModel, tmp_path: Path) -> None:
    """A NaN in the output matrix, which only `check_tensors` finds."""
    path = tmp_path / "damaged.gguf"
    whole = bytearray(tiny_model("llama").read_bytes())
    whole[-4:] = b"\xff\xff\xff\x7f"
    path.write_bytes(whole)
    Model.open(path).close()
    with pytest.raises(ModelInvalid, match="invalid data"):
        Model.open(path, options=ModelOptions(check_tensors=True))
