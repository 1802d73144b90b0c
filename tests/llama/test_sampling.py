"""Sampling options are checked when they are made."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rest_local.errors import OptionError
from rest_local.grammar import gbnf
from rest_local.llama.options import Sampling


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": True},
        {"temperature": "1"},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_k": 2**31},
        {"top_p": 1.1},
        {"top_p": -0.1},
        {"min_p": 2},
        {"seed": -1},
        {"seed": 2**32 - 1},
        {"seed": 1.0},
        {"repeat_penalty": 0},
        {"repeat_last_n": -2},
        {"presence_penalty": math.inf},
        {"frequency_penalty": math.nan},
        {"logit_bias": ((-1, 1.0),)},
        {"logit_bias": ((1, math.inf),)},
        {"logit_bias": ((1, math.nan),)},
        {"logit_bias": [(1, 1.0)]},
        {"logit_bias": ((1,),)},
        {"grammar": 'root ::= "a"'},
    ],
)
def test_a_value_out_of_range_is_refused_by_name(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(OptionError, match=name):
        Sampling(**wrong)


@pytest.mark.parametrize(
    ("options", "greedy"),
    [
        ({}, True),
        ({"top_k": 1, "seed": 3}, True),
        ({"presence_penalty": 1.0, "repeat_last_n": 0}, True),
        ({"temperature": 0.1}, False),
        ({"repeat_penalty": 1.1}, False),
        ({"frequency_penalty": 0.5}, False),
        ({"logit_bias": ((1, -math.inf),)}, False),
        ({"grammar": gbnf('root ::= "a"')}, False),
    ],
)
def test_greedy_is_temperature_zero_with_bare_logits(options: dict[str, Any], greedy: bool) -> None:
    assert Sampling(**options).is_greedy is greedy
