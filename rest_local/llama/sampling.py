"""How a token is chosen from the logits: the options of the usual llama.cpp chain, checked on construction.

This module does not use llama.cpp; `sampler` makes a chain of samplers from a `Sampling`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rest_local.errors import OptionError
from rest_local.grammar.grammar import Grammar

MAX_SEED = 0xFFFFFFFE  # llama.cpp takes 0xFFFFFFFF for "any seed"


@dataclass(frozen=True)
class Sampling:
    """Options of one request. The defaults are those of llama-server, except the temperature: 0 is greedy.

    Attributes:
        temperature: 0 = the likeliest token; else logits are divided by it
        top_k: keep the k likeliest (0 = all)
        top_p: keep the smallest set of mass top_p
        min_p: drop what has less than min_p of the likeliest's probability
        seed: 0 .. 2^32 - 2; None = a random one, which `Sampler.seed` returns
        repeat_penalty: greater than 0; 1 = off
        repeat_last_n: how many of the newest tokens the penalties count, the prompt's included (0 = off, -1 = all)
        presence_penalty: 0 = off
        frequency_penalty: 0 = off
        logit_bias: pairs of token id and bias added to its logit; -inf forbids the token
        grammar: the result of `gbnf`, `lark` or `json_schema`

    Raises OptionError for a value outside these.
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int | None = None
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _real("temperature", self.temperature, 0.0, 1e6)
        _whole("top_k", self.top_k, 0, 2**31 - 1)
        _real("top_p", self.top_p, 0.0, 1.0)
        _real("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _whole("seed", self.seed, 0, MAX_SEED)
        _real("repeat_penalty", self.repeat_penalty, 1e-6, 1e6)
        _whole("repeat_last_n", self.repeat_last_n, -1, 2**20)
        _real("presence_penalty", self.presence_penalty, -1e6, 1e6)
        _real("frequency_penalty", self.frequency_penalty, -1e6, 1e6)
        _check_bias(self.logit_bias)
        if not (self.grammar is None or isinstance(self.grammar, Grammar)):
            raise OptionError("grammar: give what gbnf, lark or json_schema of rest_local.grammar returns")

    @property
    def penalizes(self) -> bool:
        """Whether tokens seen before are penalized."""
        active = self.repeat_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return active and self.repeat_last_n != 0

    @property
    def is_greedy(self) -> bool:
        """The likeliest token of the bare logits is the answer: an arg-max, nothing shapes them."""
        return self.temperature == 0 and not self.penalizes and not self.logit_bias and self.grammar is None


def _real(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise OptionError(f"{name} is {value!r}: give a number from {low:g} to {high:g}")


def _whole(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise OptionError(f"{name} is {value!r}: give a whole number from {low} to {high}")


def _check_bias(pairs: Any) -> None:
    if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise OptionError("logit_bias: give pairs of token id and bias")
    for token, bias in pairs:
        _whole("logit_bias token", token, 0, 2**31 - 1)
        if bias != -math.inf:
            _real("logit_bias of a token", bias, -1e6, 1e6)
