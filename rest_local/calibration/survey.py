"""The long form of the self-test: the exactness and the cost of every combination of settings on this machine.

- A model goes in. A row comes out for each combination of flash attention, cache type and number of threads that
  llama.cpp accepts.
- A row has a comparison for chains and for trees, each alone and with another sequence in the same KV cache, and the
  times of a plain step and of a step of 16 tokens. It is compared with plain decoding in the same settings.
- The survey is bounded in time and counts the settings that it leaves out.
- It chooses no settings; `tuning` does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any

from rest_local.calibration.exactness import N_CTX, Comparison, Drafts, Logits, compare_drafts, rows_alone
from rest_local.calibration.measuring import DecodeProbe
from rest_local.calibration.settings import capability_of, for_memory_of, open_settings, settings_for
from rest_local.calibration.tuning import self_test_text
from rest_local.errors import ModelError
from rest_local.kv_cache.backend import Capability
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.cores import default_threads
from rest_local.llama.model import Model
from rest_local.llama.options import CACHE_TYPES, ModelOptions

SECONDS = 120.0  # for the whole survey
TELLING_TEXT = 96  # at least: some settings differ only from the 64th cell on

Progress = Callable[[str, int, int], None]  # (present setting, its number from 1, number of settings)


@dataclass
class Case:
    """The comparison of one kind of draft in one setting."""

    drafts: Drafts
    neighbours: bool
    comparison: Comparison

    def to_dict(self) -> dict[str, Any]:
        return {"drafts": self.drafts, "neighbours": self.neighbours, **self.comparison.to_dict()}


@dataclass
class Setting:
    """One combination. `plain_ms`, `step_ms`: time of a step of 1 and of 16 tokens. `plain`, `step`: the same relative
    to the fastest setting. `refused`: the error of llama.cpp if it cannot compute in this setting.
    """

    flash_attention: bool
    cache_type_k: str
    cache_type_v: str
    threads: int
    plain_ms: float = 0.0
    step_ms: float = 0.0
    plain: float = 0.0
    step: float = 0.0
    cases: list[Case] = field(default_factory=list)
    refused: str = ""

    @property
    def name(self) -> str:
        """Flash attention, cache type and threads as a phrase."""
        return f"flash attention {'on' if self.flash_attention else 'off'}, {self.cache} cache, {self.threads} threads"

    @property
    def cache(self) -> str:
        """The cache type; both types if K and V differ."""
        same = self.cache_type_k == self.cache_type_v
        return self.cache_type_k if same else f"{self.cache_type_k}/{self.cache_type_v}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "cases": [case.to_dict() for case in self.cases]}


@dataclass
class Survey:
    """The result. `drafting`, `reason`: what the model can verify, and why. `left_out`: number of settings for which
    the time was too short.
    """

    drafting: str
    reason: str
    settings: list[Setting]
    left_out: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "drafting": self.drafting,
            "reason": self.reason,
            "settings": [setting.to_dict() for setting in self.settings],
            "left_out": self.left_out,
            "seconds": round(self.seconds, 1),
        }


def survey(
    model: Model, threads: int | None = None, seconds: float = SECONDS, progress: Progress | None = None
) -> Survey:
    """Measure all settings that the model's options leave open, with `threads` threads (None: all cores) and with one.

    Takes at most `seconds` and the time of one more setting. A setting that llama.cpp refuses has `refused` set.
    """
    begun = time.perf_counter()
    n_ctx = min(N_CTX, model.n_ctx_train or N_CTX)
    wanted = for_memory_of(model, settings_for(model.options, n_ctx, 0))
    planned = list(combinations(wanted, model.options, threads or default_threads()))
    text = self_test_text(model, n_ctx)
    result = Survey("none", "", [], 0, 0.0)
    for number, settings in enumerate(planned, 1):
        left = seconds - (time.perf_counter() - begun)
        if left <= 0:
            result.left_out = len(planned) - number + 1
            break
        setting = Setting(settings.flash_attention, settings.cache_type_k, settings.cache_type_v, settings.threads)
        if progress:
            progress(setting.name, number, len(planned))
        part = left / (len(planned) - number + 1)
        capability = _measure(model, settings, setting, text, part)
        if capability:
            result.drafting, result.reason = capability.kind, capability.reason
        result.settings.append(setting)
    _relate(result.settings)
    result.seconds = time.perf_counter() - begun
    return result


def combinations(wanted: ContextSettings, options: ModelOptions, threads: int) -> Iterator[ContextSettings]:
    """Every combination that `options` leave open, with all threads first."""
    choices = list(product((True, False), CACHE_TYPES))
    for count in dict.fromkeys((threads, 1)):
        yield from open_settings(replace(wanted, threads=count), options, choices)


def _measure(
    model: Model, settings: ContextSettings, setting: Setting, text: Sequence[int], seconds: float
) -> Capability | None:
    """Fill in one setting in `seconds`, or with TELLING_TEXT tokens. Returns None if llama.cpp refuses."""
    try:
        context = Context(model, replace(settings, n_slots=2))
    except ModelError as error:
        setting.refused = str(error)
        return None
    with context:
        capability = capability_of(model, context, exact=False)
        setting.plain_ms, setting.step_ms = _price(context, text)
        token_ms = 12.0 * setting.plain_ms + 5.0  # four comparisons, opening the context, and the driver
        if capability.kind != "none":
            part = text[: max(TELLING_TEXT, int(1e3 * seconds / token_ms))]
            setting.cases = list(_cases(context, part, capability))
    return capability


def _cases(context: Context, text: Sequence[int], capability: Capability) -> Iterator[Case]:
    reference: Logits = rows_alone(context, text)
    kinds: tuple[Drafts, ...] = ("chains", "trees") if capability.kind == "tree" else ("chains",)
    for drafts in kinds:
        for neighbours in (False, True):
            compared = compare_drafts(context, text, reference, drafts, capability.longest, neighbours)
            yield Case(drafts, neighbours, compared)


def _price(context: Context, text: Sequence[int]) -> tuple[float, float]:
    """Milliseconds of a plain step and of a step of 16 tokens: the least of three."""
    probe = DecodeProbe(context, text)
    length, size = min(256, context.n_ctx // 2), min(16, context.max_outputs)
    probe(size, length)  # the first decode of a size also builds its graph
    try:
        return min(probe(1, length).ms for _ in range(3)), min(probe(size, length).ms for _ in range(3))
    finally:
        context.clear()


def _relate(settings: Sequence[Setting]) -> None:
    measured = [setting for setting in settings if not setting.refused]
    if not measured:
        return
    plain, step = min(s.plain_ms for s in measured), min(s.step_ms for s in measured)
    for setting in measured:
        setting.plain, setting.step = setting.plain_ms / plain, setting.step_ms / step
