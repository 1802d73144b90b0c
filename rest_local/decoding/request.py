"""What a caller may ask for in one generation; checked when it is made, as far as no model is needed for that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rest_local.errors import OptionError
from rest_local.llama.sampling import Sampling


@dataclass(frozen=True)
class Request:
    """One generation. Token ids are the model's own.

    Attributes:
        prompt: evaluated first; at least one token
        max_tokens: tokens of answer at most; 0 only evaluates the prompt
        sampling: how tokens are chosen, grammar and biases included
        stop: the answer ends before any of these texts
        min_tokens: no end token is chosen before as many tokens
        ignore_end: end tokens are never chosen
        prediction: tokens that the answer is likely to repeat (`Engine.predictions.tokenize`); only makes drafts
        logprobs: None, or how many of the likeliest tokens to report with each token (0: only the token itself)
        origins: report where each drafted token comes from
        policy: name of a drafting policy, None for the engine's
        verify: `strict`, `relaxed[:K,RATIO]`, None for the engine's
        exact: alone in its steps, on a context whose settings give the bits of plain decoding
        datastores: names of the engine's datastores to draft from, None for all
        keep_prefix: reuse what the cells already hold of the prompt
        context_shift: where the context is full, drop the oldest text after the first `keep_tokens` and go on
        keep_tokens: tokens at the beginning that a shift keeps (the system prompt)
        prompt_seconds: the answer ends (`length`, empty) where there is no token so many seconds after the request was
            made, which includes waiting for a slot and evaluating the prompt
        seconds: the answer ends (`length`) so many seconds after its first step began, waiting for cells included

    Raises OptionError for a number out of range.
    """

    prompt: Sequence[int]
    max_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    ignore_end: bool = False
    prediction: Sequence[int] | NDArray[np.int32] = ()
    logprobs: int | None = None
    origins: bool = False
    policy: str | None = None
    verify: str | None = None
    exact: bool = False
    datastores: tuple[str, ...] | None = None
    keep_prefix: bool = True
    context_shift: bool = False
    keep_tokens: int = 0
    prompt_seconds: float | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_tokens", "min_tokens", "keep_tokens"):
            if getattr(self, name) < 0:
                raise OptionError(f"{name} is {getattr(self, name)}: give 0 or more")
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            raise OptionError(f"logprobs is {self.logprobs}: give 0 to {MOST_LOGPROBS}")
        for name in ("prompt_seconds", "seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise OptionError(f"{name} is {value}: give a positive number")


MOST_LOGPROBS = 100
