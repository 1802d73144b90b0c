"""Measure the exactness and the cost of every combination of settings on this machine: the long self-test.

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

from rest_local.calibration.cost import LARGEST
from rest_local.calibration.exactness import N_CTX, SEGMENT, Drafts, Logits, compare_drafts, rows_alone
from rest_local.calibration.measuring import DecodeProbe
from rest_local.calibration.settings import MIXED, capability_of, for_memory_of, open_settings, settings_for
from rest_local.calibration.tuning import self_test_text
from rest_local.errors import ModelError
from rest_local.kv_cache.backend import Capability
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.cores import default_threads
from rest_local.llama.model import Model
from rest_local.llama.options import CACHE_TYPES, ModelOptions

Progress = Callable[[str, int, int], None]  # (name of the setting, its number from 1, number of settings)


@dataclass
class Setting:
    """A combination, with the times of a step of 1 and of 16 tokens (`plain_ms`, `step_ms`), also relative to the
    fastest setting (`plain`, `step`). `cases` has `Comparison.to_dict` for each kind of draft, alone and with
    neighbours. `refused` is the error of llama.cpp if it cannot compute in this setting.
    """

    flash_attention: bool
    cache_type_k: str
    cache_type_v: str
    threads: int
    plain_ms: float = 0.0
    step_ms: float = 0.0
    plain: float = 0.0
    step: float = 0.0
    cases: list[dict[str, Any]] = field(default_factory=list)
    refused: str = ""

    @property
    def name(self) -> str:
        """Return flash attention, cache type and threads as a phrase."""
        k, v = self.cache_type_k, self.cache_type_v
        cache = k if k == v else f"{k}/{v}"
        return f"flash attention {'on' if self.flash_attention else 'off'}, {cache} cache, {self.threads} threads"


def survey(model: Model, threads: int | None, seconds: float, progress: Progress) -> dict[str, Any]:
    """Measure all settings that the model's options leave open, with `threads` threads (None: all cores) and with one.

    Takes at most `seconds` and the time of one more setting. Returns, for JSON, "drafting" and "reason" (what the model
    can verify, and why), "settings" (the fields of `Setting`), "left_out" (settings for which the time was too short)
    and "seconds".
    """
    begun = time.perf_counter()
    n_ctx = min(N_CTX, model.n_ctx_train or N_CTX)
    wanted = for_memory_of(model, settings_for(model.options, n_ctx, 0))
    planned = list(combinations(wanted, model.options, threads or default_threads()))
    text = self_test_text(model, n_ctx)
    drafting, reason, measured = "none", "", list[Setting]()
    for number, settings in enumerate(planned, 1):
        left = seconds - (time.perf_counter() - begun)
        if left <= 0:
            break
        setting = Setting(settings.flash_attention, settings.cache_type_k, settings.cache_type_v, settings.threads)
        measured.append(setting)
        progress(setting.name, number, len(planned))
        if capability := _measure(model, settings, setting, text, left / (len(planned) - number + 1)):
            drafting, reason = capability.kind, capability.reason
    if working := [setting for setting in measured if not setting.refused]:
        plain, step = min(each.plain_ms for each in working), min(each.step_ms for each in working)
        for setting in working:
            setting.plain, setting.step = setting.plain_ms / plain, setting.step_ms / step
    return {
        "drafting": drafting,
        "reason": reason,
        "settings": [asdict(setting) for setting in measured],
        "left_out": len(planned) - len(measured),
        "seconds": round(time.perf_counter() - begun, 1),
    }


def combinations(wanted: ContextSettings, options: ModelOptions, threads: int) -> Iterator[ContextSettings]:
    """Yield every combination that `options` leave open, with all threads first."""
    mixed = MIXED if options.flash_attention != "off" else ()
    choices = [*mixed, *((flash, each, each) for flash, each in product((True, False), CACHE_TYPES))]
    for count in dict.fromkeys((threads, 1)):
        yield from open_settings(replace(wanted, threads=count), options, choices)


def _measure(
    model: Model, settings: ContextSettings, setting: Setting, text: Sequence[int], seconds: float
) -> Capability | None:
    """Fill in one setting in `seconds`, or with a segment beyond the 64th cell, from which on some settings differ.
    Return None if llama.cpp refuses.
    """
    try:
        context = Context(model, replace(settings, n_slots=2))
    except ModelError as error:
        setting.refused = str(error)
        return None
    with context:
        capability = capability_of(model, context, "fast")
        setting.plain_ms, setting.step_ms = _price(context, text)
        token_ms = 12.0 * setting.plain_ms + 5.0  # four comparisons, opening the context, and the driver
        if capability.kind != "none":
            part = text[: max(LARGEST + SEGMENT, int(1e3 * seconds / token_ms))]
            reference: Logits = rows_alone(context, part)
            kinds: tuple[Drafts, ...] = ("chains", "trees") if capability.kind == "tree" else ("chains",)
            for drafts, neighbours in product(kinds, (False, True)):
                found = compare_drafts(context, part, reference, drafts, capability.longest, neighbours)
                setting.cases.append({"drafts": drafts, "neighbours": neighbours, **found.to_dict()})
    return capability


def _price(context: Context, text: Sequence[int]) -> tuple[float, float]:
    """Return the milliseconds of a plain step and of a step of 16 tokens: the least of three."""
    probe = DecodeProbe(context, text)
    length, size = min(256, context.n_ctx // 2), min(16, context.max_outputs)
    probe(size, length)  # the first decode of a size also builds its graph
    try:
        return min(probe(1, length).ms for _ in range(3)), min(probe(size, length).ms for _ in range(3))
    finally:
        context.clear()
